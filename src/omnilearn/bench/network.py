"""Slow links between the workers: where balancing helps, where parking does, and never slower than the best subset.

Every worker has a network of its own with a limited rate in each direction. Same contest as ``bench sync``.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from omnilearn.bench.arguments import add_compress, add_levels, add_models, check_workloads, positive, size_of
from omnilearn.bench.gang import Gang
from omnilearn.bench.oracle import WARM_UP
from omnilearn.bench.progress import Progress
from omnilearn.bench.record import Record, Row
from omnilearn.bench.sync import BF16, ENOUGH, Contest, Effort, pieces, worst
from omnilearn.cluster import units

MODELS = ("heavy", "chatty")
RATES = ("1Gbit", "100Mbit", "20Mbit")
LATENCY = "1ms"
LONGEST = 240.0
"""Seconds after which no further round of a contest is begun: over slow links some need ten for a step."""
GOAL = {"vs_best_subset": 0.97}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_levels(parser, ("HL2",))
    add_models(parser, MODELS)
    add_compress(parser)
    parser.add_argument("--rates", help=f"of every worker's link (default: {','.join(RATES)}; quick: 100Mbit)")
    parser.add_argument(
        "--latency", default=LATENCY, help=f"of every worker's link, where the kernel has netem (default: {LATENCY})"
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        help="how often all take their turn (default: 4, quick: 2); "
        f"after {ENOUGH}, no more once {LONGEST:.0f} s are over",
    )


def run(args: argparse.Namespace) -> Record:
    words = args.rates.split(",") if args.rates else ["100Mbit"] if args.quick else list(RATES)
    rates = {word.strip(): units.rate("--rates", word) for word in words}
    latency = units.duration("--latency", args.latency)
    if args.quick and args.model is MODELS:
        args.model = MODELS[:1]
    how = Effort(
        rounds=args.rounds or (2 if args.quick else 4),
        block=6 if args.quick else 10,
        skip=WARM_UP,
        learn=30 if args.quick else 40,
        epoch=20,
        starts=0,
        start_steps=0,
        policies=("static", "optimal"),
        quick_search=True,
        longest=LONGEST,
    )
    if args.compress:
        how = replace(how, policies=(*how.policies, BF16))
    check_workloads(args, workers=4, contestants=how.contestants)
    rows: list[Row] = []
    summary: dict[str, Any] = {"goal": GOAL, "links": {}}
    links = [next(iter(rates.values()))] * 4
    count = len(args.levels) * len(rates) * len(args.model) * pieces(how)
    with Progress("network", count) as progress, Gang(4, links=links, latency=latency) as gang:
        summary["emulation"] = gang.emulator.how
        summary["latency"] = args.latency if gang.emulator.latency else "left out: this kernel has no netem"
        for level in args.levels:
            gang.level(level)
            for word, rate in rates.items():
                for worker in range(gang.size):
                    gang.emulator.change(worker=worker, bandwidth=rate)
                outcomes = {}
                for name in args.model:
                    contest = Contest(gang, f"{level} {word}", name, size_of(args), how, progress)
                    before = list(rows)
                    for measured in contest.run():
                        rows = before + measured
                        outcomes[name] = contest.summary()
                        summary["links"][f"{level} {word}"] = worst(outcomes)
                        Record("network", rows, summary).keep(args.json)
    found = [link["vs_best_subset"] for link in summary["links"].values()]
    summary["vs_best_subset"] = min((value for value in found if value is not None), default=None)
    return Record("network", rows, summary)
