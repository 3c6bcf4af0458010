"""What OmniLearn costs where it has nothing to do: equal machines, against raw DistributedDataParallel.

With TensorFlow, which has no DistributedDataParallel, *ddp* is a hand-written loop with the same collectives.

Both live in the same processes and take turns in short blocks of steps; every pair of neighbouring blocks gives a
ratio. ``ratio`` compares a block's typical (median) step, ``ratio_of_totals`` whole blocks, with all that happens
between steps and at the ends of an epoch. On CUDA single steps cannot be timed without stopping the card, so both are
of whole blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from omnilearn.bench.arguments import (
    add_cluster,
    add_device,
    add_framework,
    add_size,
    check_workloads,
    names,
    positive,
    size_of,
)
from omnilearn.bench.gang import Gang, Trace
from omnilearn.bench.names import NAMES, Size
from omnilearn.bench.progress import Progress
from omnilearn.bench.record import Record, Row, median_and_spread
from omnilearn.bench.turns import order
from omnilearn.cluster.emulation import parse
from omnilearn.cluster.resources import cores
from omnilearn.control import apportion
from omnilearn.errors import InfeasibleError

GOALS = {"pytorch": 1.01, "tensorflow": 1.05}
"""Against raw DDP; against a hand-written loop with the same collectives."""
CONTESTANTS = ("ddp", "uniform", "optimal")
WARM_UP = 2
"""Steps at the start of a block that do not count in ``ratio``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=names(NAMES),
        help="workloads (default: resnet18 and, where scikit-learn is, digits; quick: even)",
    )
    add_size(parser)
    add_cluster(parser, "what the workers get instead of an equal part of the cores")
    parser.add_argument("--nproc", type=positive, help="equal workers (default: 2, or as many as are emulated)")
    parser.add_argument("--blocks", type=positive, help="blocks of each contestant (default: 40, quick: 6)")
    parser.add_argument("--steps", type=positive, help="steps per block (default: 20, quick: 10)")
    add_device(parser)
    add_framework(parser)


def run(args: argparse.Namespace) -> Record:
    blocks, steps = args.blocks or (6 if args.quick else 40), args.steps or (10 if args.quick else 20)
    if steps <= WARM_UP:
        raise InfeasibleError(f"--steps {steps} leaves nothing to measure: the first {WARM_UP} of a block are dropped")
    if args.model is None:
        large = ("resnet18",) if args.framework == "pytorch" else ("heavy",)
        args.model = ("even",) if args.quick else (*large, "digits") if find_spec("sklearn") else large
    goal = GOALS[args.framework]
    emulation = parse(args.emulate, args.nproc, cores()) if args.emulate else None
    check_workloads(args, emulation.nproc if emulation else args.nproc or 2, len(CONTESTANTS), equally=False)
    device = "cuda" if emulation and emulation.uses("mps") else args.device
    rows: dict[str, list[Row]] = {}
    models: dict[str, Any] = {}
    with (
        Progress("overhead", len(args.model) * (blocks + 1)) as progress,
        Gang(args.nproc or 2, limited=False, device=args.device, emulation=emulation, framework=args.framework) as gang,
    ):
        gang.threads([max(1, int(cores()) // gang.size)] * gang.size)

        def record() -> Record:
            first = models[args.model[0]]
            summary = {
                "model": args.model[0],
                "nproc": gang.size,
                "emulate": args.emulate,
                "device": device,
                "blocks": blocks,
                "steps": steps,
                "ratio": first["ratio"],
                "ratio_spread": first["ratio_spread"],
                "goal": goal,
                "framework": args.framework,
                "models": models,
            }
            return Record("overhead", [row for own in rows.values() for row in own], summary)

        for name in args.model:
            for outcome, measured in compare(gang, name, size_of(args), blocks, steps, device, progress):
                models[name], rows[name] = outcome, measured
                record().keep(args.json)
    return record()


def compare(
    gang: Gang, name: str, size: Size, blocks: int, steps: int, device: str, progress: Progress
) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """The outcome so far, after every turn."""
    batch = gang.workload(name, size).global_batch
    least = np.ones(gang.size, dtype=np.int64)
    split = tuple(int(b) for b in apportion(np.ones(gang.size), batch, least, np.full(gang.size, batch)))
    with gang.session(name, size, watch=False):
        gang.all("open_plain", "ddp", {})
        for policy in CONTESTANTS[1:]:
            gang.all("open_omni", policy, steps, policy, {}, doing=f"setting up {policy}")

        def block(contestant: str) -> Trace:
            return gang.block(contestant, *([steps, split] if contestant == "ddp" else []))

        for contestant in CONTESTANTS:
            block(contestant)
        progress.done(f"{name}: warm-up")
        traces: dict[str, list[Trace]] = {contestant: [] for contestant in CONTESTANTS}
        for turn in range(blocks):
            for contestant in order(CONTESTANTS, turn):
                traces[contestant].append(block(contestant))
            progress.done(f"{name}: block {turn + 1} of {blocks}")
            yield judge(name, traces, device)


def judge(name: str, traces: dict[str, list[Trace]], device: str) -> tuple[dict[str, Any], list[Row]]:
    def typical(trace: Trace) -> float:
        return float(np.median(trace.seconds[WARM_UP:])) if device == "cpu" else trace.total / len(trace.seconds)

    rows: list[Row] = []
    outcome: dict[str, Any] = {}
    for contestant, own in traces.items():
        times = median_and_spread(1e3 * typical(trace) for trace in own)
        ratios = [typical(mine) / typical(raw) for mine, raw in zip(own, traces["ddp"], strict=True)]
        totals = [mine.total / raw.total for mine, raw in zip(own, traces["ddp"], strict=True)]
        ratio, total = median_and_spread(ratios), median_and_spread(totals)
        rows.append(
            {
                "model": name,
                "contestant": contestant,
                "step_ms": times["median"],
                "step_ms_lower": times["lower"],
                "step_ms_upper": times["upper"],
                "ratio": ratio["median"],
                "ratio_lower": ratio["lower"],
                "ratio_upper": ratio["upper"],
                "ratio_of_totals": total["median"],
                "batches": "/".join(map(str, own[-1].batches[-1])),
            }
        )
        if contestant == "ddp":
            outcome["step_ms"] = times["median"]
        else:
            outcome[contestant] = {
                "ratio": ratio["median"],
                "ratio_spread": [ratio["lower"], ratio["upper"]],
                "ratio_of_totals": total["median"],
                "ratio_of_totals_spread": [total["lower"], total["upper"]],
            }
    return {"ratio": outcome["optimal"]["ratio"], "ratio_spread": outcome["optimal"]["ratio_spread"], **outcome}, rows
