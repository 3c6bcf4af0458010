"""A cluster that changes while it trains: the papers' climb HL1 → 2 → 4 → 8 and back, in one run.

Workers have as many threads as whole cores; where there is not a core for each, one thread and at most one core. The
contestants travel together: after every change each makes its steps in short turns, and so does the oracle, the best
fixed split of the level, searched beforehand. A step is compared with the oracle's of the same turn, so that a machine
that slows down for a while slows all down alike; how long it takes to be near the oracle is counted in steps.

With ``--load K`` the journey is another one: of any cluster, in which worker K's device is busy with something else
for a while (``load.py``). Shares of a card (MPS) cannot change while workers run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omnilearn.bench import oracle
from omnilearn.bench.arguments import add_cluster, add_models, check_workloads, names, positive, size_of
from omnilearn.bench.gang import Batches, Gang
from omnilearn.bench.names import Size
from omnilearn.bench.oracle import SPLITS, show
from omnilearn.bench.progress import Progress
from omnilearn.bench.record import Record, Row, median_and_spread
from omnilearn.bench.sync import steps_to
from omnilearn.bench.turns import order
from omnilearn.bench.workloads import workload
from omnilearn.cluster.emulation import LEVELS, level, parse
from omnilearn.cluster.resources import cores
from omnilearn.control.problem import Floats
from omnilearn.errors import InfeasibleError, UsageError

CLIMB: tuple[str, ...] = ("HL1", "HL2", "HL4", "HL8", "HL4", "HL2", "HL1")
FREE, LOADED = "free", "loaded"
CONTESTANTS = ("ddp", "static", "proportional", "optimal")
GOAL = 10
TURN = 10
"""Steps that a contestant makes before it is another's turn, or a few more or less."""
FINALISTS, FINALS = 6, 4
"""Of so many splits, or one more, the oracle is chosen, after so many turns of each."""


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
    parser.add_argument(
        "--steps", type=positive, help="steps at each level, in turns of about ten (default: 30, quick: 14)"
    )
    parser.add_argument("--rounds", type=positive, help="journeys of each contestant (default: 3, quick: 1)")


def run(args: argparse.Namespace) -> Record:
    emulation = parse(args.emulate, None, cores()) if args.emulate else None
    workers = 4 if emulation is None else emulation.nproc
    _check(args, workers)
    climb: tuple[str, ...] = args.levels or (("HL1", "HL8") if args.quick else CLIMB)
    if args.load is not None:
        climb = (FREE, LOADED, FREE)
    steps, rounds = args.steps or (14 if args.quick else 30), args.rounds or (1 if args.quick else 3)
    contestants: tuple[str, ...] = CONTESTANTS
    if args.quick:
        contestants = ("ddp", "optimal") if args.load is None else ("ddp", "static", "optimal")
    check_workloads(args, workers, len((SPLITS, *contestants)))
    turns = max(round(steps / TURN), 1)
    each = math.ceil(steps / turns)
    rows: dict[str, list[Row]] = {}
    outcomes: dict[str, Any] = {}
    total = len(args.model) * ((3 if args.quick else 4) * len(set(climb)) + rounds * len(climb))
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
                "steps": turns * each,
                "turn": each,
                "goal": GOAL,
                # The worst of the workloads.
                "steps_to_90": None if None in steps_to_90 else max(steps_to_90),
                "speedup_vs_uniform": min(outcome["speedup_vs_uniform"] for outcome in outcomes.values()),
                "workloads": outcomes,
                "emulation": gang.emulator.how,
            }
            return Record("dynamic", [row for own in rows.values() for row in own], summary)

        for name in args.model:
            way = Way(climb, turn, turns, each)
            journeys = travel(gang, name, size_of(args), way, contestants, rounds, args.quick, progress)
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


@dataclass(frozen=True)
class Way:
    """The words of the climb, what makes the cluster what a word says, and the turns of so many steps at each."""

    climb: tuple[str, ...]
    change: Callable[[str], None]
    turns: int
    each: int


@dataclass
class Journey:
    """What one contestant did."""

    seconds: Floats  # of each step: stages × turns × steps
    batches: list[Batches]  # at the end of each stage


def travel(
    gang: Gang,
    name: str,
    size: Size,
    way: Way,
    contestants: tuple[str, ...],
    rounds: int,
    quick: bool,
    progress: Progress,
) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """The outcome so far, after every journey of all contestants."""
    batch = workload(name, size).global_batch
    splits: dict[str, Batches] = {}
    with gang.session(name, size) as least:
        gang.all("open_plain", SPLITS, {})
        for word in dict.fromkeys(way.climb):
            way.change(word)

            def say(text: str, at: str = word) -> None:
                progress.done(f"{name} {at}: {text}")

            found = oracle.search(gang, batch, least, quick=quick, say=say)
            splits[word] = found.fastest(1)[0]
            if not quick:
                splits[word] = _best(gang, finalists := _finalists(found, gang.size), way.each)
                say(f"best of {len(finalists)} of them: {show(splits[word])}")
        journeys: dict[str, list[Journey]] = {who: [] for who in (SPLITS, *contestants)}
        plans: list[list[str]] = []
        for around in range(rounds):

            def arrive(text: str, at: int = around) -> None:
                progress.done(f"{name}, journey {at + 1} of {rounds}: {text}")

            for who, made in _journey(gang, contestants, splits, way, batch, arrive).items():
                journeys[who].append(made)
            decided = gang.all("reasons", "optimal")[0]
            plans.append([f"{step}: {show(split)} {reason}" for step, split, reason in decided])
            for contestant in contestants:
                gang.all("close", contestant)
            outcome, rows = _judge(name, way.climb, journeys, splits)
            yield {**outcome, "plans": plans}, rows


def _finalists(found: oracle.Search, size: int) -> list[Batches]:
    """The fastest of a search, and the fastest over all workers: that one was tried first, and seldom."""
    everybody = found.best(lambda workers: workers == size)
    return list(dict.fromkeys(filter(None, [*found.fastest(FINALISTS), everybody])))


def _best(gang: Gang, splits: Sequence[Batches], steps: int) -> Batches:
    """The fastest of these, timed in turns: that of a search with a few steps each is the luckiest of many."""
    seconds: dict[Batches, list[float]] = {split: [] for split in splits}
    for turn in range(FINALS):
        for split in splits if turn % 2 else splits[::-1]:
            trace = gang.block(SPLITS, steps, split).after(min(oracle.WARM_UP, steps - 1))
            seconds[split].append(float(np.median(trace.seconds)))
    return min(splits, key=lambda split: float(np.median(seconds[split])))


def _journey(
    gang: Gang,
    contestants: tuple[str, ...],
    splits: dict[str, Batches],
    way: Way,
    batch: int,
    arrive: Callable[[str], None],
) -> dict[str, Journey]:
    """All contestants and the oracle through all levels, taking turns."""
    way.change(way.climb[0])
    for contestant in contestants:
        if contestant == "ddp":
            gang.all("open_plain", contestant, {})
        else:
            gang.all("open_omni", contestant, way.each, contestant, {}, doing=f"setting up {contestant}")
    everybody = (SPLITS, *contestants)
    made = {who: Journey(np.empty((len(way.climb), way.turns, way.each)), [()] * len(way.climb)) for who in everybody}
    for stage, word in enumerate(way.climb):
        way.change(word)
        for turn in range(way.turns):
            for who in order(everybody, stage * way.turns + turn):
                fixed = {SPLITS: splits[word], "ddp": (batch // gang.size,) * gang.size}.get(who)
                trace = gang.block(who, *([] if fixed is None else [way.each, fixed]))
                made[who].seconds[stage, turn] = trace.seconds
                made[who].batches[stage] = trace.batches[-1]
        arrive(word)
    return made


def pace(own: Floats, best: Floats) -> Floats:
    """How fast a contestant was, as a fraction of the oracle's speed, at every stage and step.

    Against the oracle's typical step of the same turn. Where in a turn a step comes matters too: with cold caches the
    first one takes longer, for the oracle as for all others.

    >>> pace(np.array([[[3.0, 2.0, 2.0], [6.0, 4.0, 2.0]]]), np.array([[[1.5, 1.0, 1.0], [3.0, 2.0, 2.0]]])).tolist()
    [[0.5, 0.5, 0.5, 0.5, 0.5, 1.0]]
    """
    typical = np.median(best, axis=-1, keepdims=True)
    profile = np.median(best / typical, axis=tuple(range(best.ndim - 1)))
    return np.asarray((typical * profile / own).reshape(len(own), -1))


def _judge(
    name: str, climb: tuple[str, ...], journeys: dict[str, list[Journey]], splits: dict[str, Batches]
) -> tuple[dict[str, Any], list[Row]]:
    best = [made.seconds for made in journeys[SPLITS]]
    rows: list[Row] = []
    reached: dict[str, list[int | None]] = {}
    for who in (who for who in journeys if who != SPLITS):
        paces = [pace(made.seconds, fastest) for made, fastest in zip(journeys[who], best, strict=True)]
        reached[who] = []
        for stage, word in enumerate(climb):
            soon = [steps_to(1 / each[stage], 1.0) for each in paces]
            late = [float(np.median(each[stage, each.shape[1] // 2 :])) for each in paces]
            known = [value for value in soon if value is not None]
            # A journey on which it was never reached counts as the longest.
            typical = sorted(soon, key=lambda value: math.inf if value is None else value)[len(soon) // 2]
            reached[who].append(typical)
            rows.append(
                {
                    "workload": name,
                    "contestant": who,
                    "stage": f"{stage + 1}: {word}",
                    "steps_to_90": typical,
                    "reached": f"{len(known)} of {len(soon)}",
                    "step_ms": 1e3 * _late(journeys[who], stage),
                    "fraction_of_oracle": float(np.median(late)),
                    "batches": show(journeys[who][-1].batches[stage]),
                    "oracle_ms": 1e3 * _late(journeys[SPLITS], stage),
                    "oracle": show(splits[word]),
                }
            )
    totals = {who: [float(made.seconds.sum()) for made in own] for who, own in journeys.items()}
    oracles = totals.pop(SPLITS)
    after = reached["optimal"][1:]
    outcome: dict[str, Any] = {
        "steps_to_90": None if None in after else max((value for value in after if value is not None), default=0),
        "steps_to_90_by_stage": dict(
            zip([f"{k + 1}: {word}" for k, word in enumerate(climb)], reached["optimal"], strict=True)
        ),
        "total_s": {who: median_and_spread(values) for who, values in totals.items()},
        "oracle_total_s": median_and_spread(oracles),
    }
    for who, values in {**totals, "oracle": oracles}.items():
        if who != "optimal":
            key = {"ddp": "speedup_vs_uniform", "oracle": "fraction_of_oracle"}.get(who, f"speedup_vs_{who}")
            ratios = median_and_spread([other / own for other, own in zip(values, totals["optimal"], strict=True)])
            outcome[key], outcome[f"{key}_spread"] = ratios["median"], [ratios["lower"], ratios["upper"]]
    return outcome, rows


def _late(journeys: Sequence[Journey], stage: int) -> float:
    """Seconds of a typical step in a stage's second half."""
    halves = [made.seconds[stage].ravel()[made.seconds[stage].size // 2 :] for made in journeys]
    return float(np.median([np.median(half) for half in halves]))
