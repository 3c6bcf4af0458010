"""A cluster that changes while it trains: the papers' climb HL1 → 2 → 4 → 8 and back, in one run.

Workers have as many threads as whole cores; where there is not a core for each, one thread and at most one core. The
oracle of every level is searched beforehand and timed again beside the journeys. Each contestant makes the whole
journey, in turn, several times; how long it takes to be near the new level's oracle is counted in steps.

With ``--load K`` the journey is another one: of any cluster, in which worker K's device is busy with something else
for a while (``load.py``). Shares of a card (MPS) cannot change while workers run.
"""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from omnilearn.bench import oracle
from omnilearn.bench.arguments import add_cluster, add_models, check_workloads, names, positive, size_of
from omnilearn.bench.gang import Batches, Gang, Trace
from omnilearn.bench.names import Size
from omnilearn.bench.oracle import SPLITS, show
from omnilearn.bench.progress import Progress
from omnilearn.bench.record import Record, Row, median_and_spread
from omnilearn.bench.sync import steps_to
from omnilearn.bench.workloads import workload
from omnilearn.cluster.emulation import LEVELS, level, parse
from omnilearn.cluster.resources import cores
from omnilearn.errors import InfeasibleError, UsageError

CLIMB: tuple[str, ...] = ("HL1", "HL2", "HL4", "HL8", "HL4", "HL2", "HL1")
FREE, LOADED = "free", "loaded"
CONTESTANTS = ("ddp", "static", "proportional", "optimal")
GOAL = 10
LOOK = 0.003
"""Seconds between two looks at how far the training is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    spelled = {name: name for name in LEVELS["sync"]}
    parser.add_argument(
        "--levels",
        type=lambda text: tuple(names(spelled)(word)[0] for word in text.split(",")),
        help=f"the levels in turn (default: {','.join(CLIMB)}; quick: HL1,HL8)",
    )
    add_cluster(parser, "another cluster than four equal workers, with --load")
    parser.add_argument(
        "--load",
        type=int,
        metavar="K",
        help="instead of levels: worker K's device is free, loaded with other work, free",
    )
    add_models(parser, ("heavy",))
    parser.add_argument("--steps", type=positive, help="steps at each level (default: 30, quick: 14)")
    parser.add_argument("--rounds", type=positive, help="journeys of each contestant (default: 3, quick: 1)")


def run(args: argparse.Namespace) -> Record:
    emulation = parse(args.emulate, None, cores()) if args.emulate else None
    workers = 4 if emulation is None else emulation.nproc
    _check(args, workers)
    check_workloads(args, workers)
    climb: tuple[str, ...] = args.levels or (("HL1", "HL8") if args.quick else CLIMB)
    if args.load is not None:
        climb = (FREE, LOADED, FREE)
    steps, rounds = args.steps or (14 if args.quick else 30), args.rounds or (1 if args.quick else 3)
    contestants: tuple[str, ...] = CONTESTANTS
    if args.quick:
        contestants = ("ddp", "optimal") if args.load is None else ("ddp", "static", "optimal")
    rows: dict[str, list[Row]] = {}
    outcomes: dict[str, Any] = {}
    total = len(args.model) * (3 * len(set(climb)) + rounds * len(contestants))
    with Progress("dynamic", total) as progress, Gang(4, emulation=emulation) as gang:

        def turn(word: str) -> None:
            if args.load is None:
                gang.cpu(shares(word))
            else:
                gang.load(args.load if word == LOADED else None)

        def record() -> Record:
            steps_to_90 = [outcome["steps_to_90"] for outcome in outcomes.values()]
            summary = {
                "climb": climb,
                "load": args.load,
                "steps": steps,
                "goal": GOAL,
                # The worst of the workloads.
                "steps_to_90": None if None in steps_to_90 else max(steps_to_90),
                "speedup_vs_uniform": min(outcome["speedup_vs_uniform"] for outcome in outcomes.values()),
                "workloads": outcomes,
                "emulation": gang.emulator.how,
            }
            return Record("dynamic", [row for own in rows.values() for row in own], summary)

        for name in args.model:
            journeys = journey(gang, name, size_of(args), climb, turn, steps, rounds, contestants, args.quick, progress)
            for outcomes[name], rows[name] in journeys:
                record().keep(args.json)
        return record()


def _check(args: argparse.Namespace, size: int) -> None:
    if args.steps is not None and args.steps < 3:
        raise InfeasibleError(f"--steps {args.steps} at each level are too few to see speed in: give 3 or more")
    if args.load is None and args.emulate:
        raise UsageError("--emulate here needs --load K: levels are of four equal workers")
    if args.load is not None and args.levels:
        raise UsageError("--load and --levels are two different journeys: give one of them")
    if args.load is not None and not 0 <= args.load < size:
        raise InfeasibleError(f"--load {args.load}: there are workers 0 to {size - 1}")


def shares(name: str) -> tuple[float, ...]:
    """What a level's workers get. Where cores do not suffice for one each: at most one, which one thread can use."""
    all_levels = [level(word, cores()) for word in LEVELS["sync"]]
    scale = 1.0 if min(map(min, all_levels)) >= 1 else max(1.0, *map(max, all_levels))
    return tuple(share / scale for share in level(name, cores()))


def journey(
    gang: Gang,
    name: str,
    size: Size,
    climb: tuple[str, ...],
    turn: Callable[[str], None],
    steps: int,
    rounds: int,
    contestants: tuple[str, ...],
    quick: bool,
    progress: Progress,
) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """The outcome so far, after every round. ``turn`` makes the cluster what a word of the climb says."""
    batch = workload(name, size).global_batch
    best: dict[str, list[float]] = {word: [] for word in climb}
    splits: dict[str, Batches] = {}
    with gang.session(name, size) as least:
        gang.all("open_plain", SPLITS, {})
        for word in dict.fromkeys(climb):
            turn(word)

            def say(text: str, at: str = word) -> None:
                progress.done(f"{name} {at}: {text}")

            found = oracle.search(gang, batch, least, quick=quick, say=say)
            splits[word] = found.fastest(1)[0]
        traces: dict[str, list[tuple[Trace, list[int]]]] = {contestant: [] for contestant in contestants}
        plans: list[list[str]] = []
        for around in range(rounds):
            # The shortest of many short measurements is too good to be true: again, beside the journeys.
            for word, split in splits.items():
                turn(word)
                again = gang.block(SPLITS, oracle.WARM_UP + 8, split).after(oracle.WARM_UP)
                best[word] += again.seconds.tolist()
            for contestant in contestants if around % 2 else contestants[::-1]:
                turn(climb[0])
                trace, changed, decided = _travel(gang, contestant, climb, turn, steps, batch)
                traces[contestant].append((trace, changed))
                if contestant == "optimal":
                    plans.append(decided)
                progress.done(f"{name}: {contestant}, journey {around + 1} of {rounds}")
            typical = {word: float(np.median(seconds)) for word, seconds in best.items()}
            outcome, rows = _judge(name, climb, traces, typical, splits)
            yield {**outcome, "plans": plans}, rows


def _travel(
    gang: Gang, contestant: str, climb: tuple[str, ...], turn: Callable[[str], None], steps: int, batch: int
) -> tuple[Trace, list[int], list[str]]:
    """One contestant through all levels. Also the steps at which the level really changed, and OmniLearn's plans."""
    total = steps * len(climb)
    gang.emulator.progress_file.write_bytes(bytes(8))
    changed, over, problems = [0], threading.Event(), []

    def change() -> None:
        try:
            for stage in range(1, len(climb)):
                while gang.step < stage * steps:
                    if over.wait(LOOK):
                        return
                turn(climb[stage])
                changed.append(gang.step)
        except Exception as error:
            problems.append(error)

    if contestant == "ddp":
        gang.all("open_plain", contestant, {})
        arguments: list[Any] = [total, (batch // gang.size,) * gang.size]
    else:
        gang.all("open_omni", contestant, total, contestant, {}, doing=f"setting up {contestant}")
        arguments = []
    watcher = threading.Thread(target=change, name="omnilearn-bench-climb", daemon=True)
    watcher.start()
    try:
        trace = gang.block(contestant, *arguments, limit=1800.0)
    finally:
        over.set()
        watcher.join(30)
    for problem in problems:
        raise problem
    plans = gang.all("reasons", contestant)[0] if contestant != "ddp" else []
    gang.all("close", contestant)
    decided = [f"{step}: {show(split)} {reason}" for step, split, reason in plans]
    return trace, [*changed, *range(steps * len(changed), total, steps)], decided


def _judge(
    name: str,
    climb: tuple[str, ...],
    traces: dict[str, list[tuple[Trace, list[int]]]],
    best: dict[str, float],
    splits: dict[str, Batches],
) -> tuple[dict[str, Any], list[Row]]:
    rows: list[Row] = []
    reached: dict[str, list[float | None]] = {contestant: [] for contestant in traces}
    for contestant, runs in traces.items():
        for stage, word in enumerate(climb):
            soon, late, last = [], [], ""
            spent: list[float] = []
            for trace, changed in runs:
                begin = changed[stage]
                end = changed[stage + 1] if stage + 1 < len(changed) else len(trace.seconds)
                soon.append(steps_to(trace.seconds[begin:end], best[word]))
                spent.append(float(np.median(trace.seconds[(begin + end) // 2 : end])))
                late.append(best[word] / spent[-1])
                last = show(trace.batches[end - 1])
            known = [value for value in soon if value is not None]
            # A journey on which it was never reached counts as the longest.
            typical = sorted(soon, key=lambda value: math.inf if value is None else value)[len(soon) // 2]
            reached[contestant].append(typical)
            rows.append(
                {
                    "workload": name,
                    "contestant": contestant,
                    "stage": f"{stage + 1}: {word}",
                    "steps_to_90": typical,
                    "reached": f"{len(known)} of {len(soon)}",
                    "step_ms": 1e3 * float(np.median(spent)),
                    "fraction_of_oracle": float(np.median(late)),
                    "batches": last,
                    "oracle_ms": 1e3 * best[word],
                    "oracle": show(splits[word]),
                }
            )
    totals = {contestant: [trace.total for trace, _ in runs] for contestant, runs in traces.items()}
    after = reached["optimal"][1:]
    outcome: dict[str, Any] = {
        "steps_to_90": None if None in after else max((value for value in after if value is not None), default=0),
        "steps_to_90_by_stage": dict(
            zip([f"{k + 1}: {word}" for k, word in enumerate(climb)], reached["optimal"], strict=True)
        ),
        "total_s": {contestant: median_and_spread(values) for contestant, values in totals.items()},
    }
    for contestant in traces:
        if contestant != "optimal":
            key = "speedup_vs_uniform" if contestant == "ddp" else f"speedup_vs_{contestant}"
            ratios = [other / own for other, own in zip(totals[contestant], totals["optimal"], strict=True)]
            outcome[key] = float(np.median(ratios))
    return outcome, rows
