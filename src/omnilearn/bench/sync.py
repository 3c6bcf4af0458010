"""Synchronous training at the papers' heterogeneity levels: uniform DDP, the policies, and the best fixed split.

Per level and workload: the oracle is searched (``oracle.py``), the policies learn, then all take turns in short
blocks, several rounds. Ratios are taken within a round and their median is reported, so that a machine that slows
down for a while slows all of them. The oracle of a round is the split that was the fastest in the others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from omnilearn.bench import oracle
from omnilearn.bench.arguments import (
    add_cluster,
    add_compress,
    add_framework,
    add_levels,
    add_models,
    check_workloads,
    positive,
    size_of,
)
from omnilearn.bench.gang import Batches, Floats, Gang, Trace, joined
from omnilearn.bench.names import Size
from omnilearn.bench.oracle import SPLITS, Search, show
from omnilearn.bench.progress import Progress
from omnilearn.bench.record import Record, Row, median_and_spread
from omnilearn.bench.turns import order
from omnilearn.cluster.emulation import parse
from omnilearn.cluster.resources import cores

LEVELS = ("HL1", "HL2", "HL4", "HL8")
POLICIES = ("static", "proportional", "prototype", "optimal")
BF16 = "optimal, compressed"
"""With gradients sent in bfloat16; only where it is asked for."""
AGAIN = "ddp again"
"""Uniform DDP a second time: how far it is from the first says what such a measurement is worth."""
FIXED = ("static",)
"""Policies with nothing to learn."""
NEAR = 0.9
ENOUGH = 2
"""The fewest rounds, and the fewest steps of a block that count, where they take long."""
LONG_BLOCK = 30.0
"""Seconds that a block of steps with a fixed split should not take longer than."""
GOALS = {
    "HL8": {"fraction_of_oracle": 0.95, "speedup_vs_uniform": {"heavy": 2.0, "chatty": 8.0}},
    "HL1": {"speedup_vs_uniform": 0.99},
    "all": {"vs_best_subset": 0.97},
}


@dataclass(frozen=True)
class Effort:
    """How long things are measured, in steps and rounds."""

    rounds: int
    block: int
    """Steps per turn: an epoch to OmniLearn…"""
    skip: int
    """… of which the first do not count. At the end of an epoch the parked get the model, which may take that long."""
    learn: int
    epoch: int
    """Steps after which the prototype adjusts; its authors' epochs are longer."""
    starts: int
    """Runs from uniform batches, for ``steps_to_90``."""
    start_steps: int
    policies: tuple[str, ...] = POLICIES
    quick_search: bool = False
    seconds: float = 0.0
    """Further rounds are made until all took so long: short steps are noisier, and more of them as easily measured."""
    longest: float | None = None
    """Once there are ENOUGH rounds, none is begun after so many seconds."""

    @property
    def contestants(self) -> int:
        """With a model of their own."""
        return len((SPLITS, AGAIN, *self.policies))


def effort(quick: bool) -> Effort:
    if quick:
        return Effort(
            rounds=2,
            block=6,
            skip=oracle.WARM_UP,
            learn=48,
            epoch=10,
            starts=1,
            start_steps=16,
            policies=("static", "optimal"),
            quick_search=True,
        )
    return Effort(rounds=8, block=10, skip=3, learn=64, epoch=20, starts=3, start_steps=40, seconds=150)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_levels(parser, LEVELS)
    add_cluster(parser, "another cluster instead of the levels")
    add_models(parser, ("heavy", "even", "chatty"))
    add_compress(parser)
    parser.add_argument(
        "--rounds",
        type=positive,
        help="how often all take their turn (default: 8, quick: 2); where steps are "
        "short and it is not --quick, more often, until that has taken two and a half minutes",
    )
    add_framework(parser)


def run(args: argparse.Namespace) -> Record:
    emulation = parse(args.emulate, None, cores()) if args.emulate else None
    how = effort(args.quick)
    if args.compress:
        how = replace(how, policies=(*how.policies, BF16))
    check_workloads(args, workers=emulation.nproc if emulation else 4, contestants=how.contestants)
    if args.rounds:
        how = replace(how, rounds=args.rounds)
    rows: list[Row] = []
    summary: dict[str, Any] = {"goals": GOALS, "framework": args.framework, "effort": asdict(how), "levels": {}}
    levels = (args.emulate,) if args.emulate else args.levels
    with (
        Progress("sync", len(levels) * len(args.model) * pieces(how)) as progress,
        Gang(emulation=emulation, framework=args.framework) as gang,
    ):
        summary["emulation"], summary["devices"] = gang.emulator.how, gang.devices
        for level in levels:
            if emulation is None:
                gang.level(level)
            outcomes = {}
            for name in args.model:
                contest = Contest(gang, level, name, size_of(args), how, progress)
                before = list(rows)
                for measured in contest.run():
                    rows = before + measured
                    outcomes[name] = contest.summary()
                    summary["levels"][level] = worst(outcomes)
                    Record("sync", rows, summary).keep(args.json)
    return Record("sync", rows, summary)


def pieces(how: Effort) -> int:
    """What a contest reports as done."""
    return 4 + how.rounds + (how.starts > 0)


def worst(outcomes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A level's summary: the least over the workloads, and each of them."""
    keys = ("speedup_vs_uniform", "fraction_of_oracle", "vs_best_subset")
    level: dict[str, Any] = {
        key: min((outcome[key] for outcome in outcomes.values() if outcome[key] is not None), default=None)
        for key in keys
    }
    steps = [outcome["steps_to_90"] for outcome in outcomes.values()]
    level["steps_to_90"] = None if None in steps else max(steps)
    return {**level, "workloads": outcomes}


@dataclass
class Contest:
    """One workload at one level."""

    gang: Gang
    level: str
    name: str
    size: Size
    how: Effort
    progress: Progress
    rounds: dict[str, list[Trace]] = field(default_factory=dict)
    splits: dict[str, Batches] = field(default_factory=dict)
    starts: list[Trace] = field(default_factory=list)
    search: Search | None = None
    plans: list[tuple[int, Batches, str]] = field(default_factory=list)

    def run(self) -> Iterator[list[Row]]:
        """The rows so far, after every round and at the end."""
        gang, how = self.gang, self.how
        batch = self.gang.workload(self.name, self.size).global_batch
        with gang.session(self.name, self.size) as least:
            gang.all("open_plain", SPLITS, {})
            gang.all("open_plain", AGAIN, {})
            self.search = oracle.search(gang, batch, least, quick=how.quick_search, say=self._done)
            for policy in how.policies:
                kind = {"prototype": f"proportional every {how.epoch}", BF16: "optimal"}.get(policy, policy)
                options = {"compress": "bf16"} if policy == BF16 else {}
                gang.all("open_omni", policy, how.block, kind, options, doing=f"setting up {policy}")
            for policy in (policy for policy in how.policies if policy not in FIXED):
                for _ in range(-(-how.learn // how.block)):
                    last = gang.block(policy)
                if policy == "optimal":
                    ended = last.batches[-1]
            self._done("policies have learned")
            self._choose(batch, ended)
            turn, begin = 0, time.monotonic()
            while self._another(turn, time.monotonic() - begin):
                for contestant in order([*self.splits, *how.policies, AGAIN], turn):
                    self.rounds.setdefault(contestant, []).append(self._block(contestant))
                turn += 1
                self.progress.total += turn > how.rounds
                self._done(f"round {turn}" + (f" of {how.rounds}" if turn <= how.rounds else ""))
                yield self._rows()
            self.progress.total -= max(how.rounds - turn, 0)
            self.plans = gang.all("reasons", "optimal")[0]
            for start in range(how.starts):
                name = f"start {start}"
                gang.all("open_omni", name, how.start_steps, "optimal from uniform", {}, doing="setting up a start")
                self.starts.append(gang.block(name))
                gang.all("close", name)
            if how.starts:
                self._done("starts from uniform")
        yield self._rows()

    def _done(self, text: str) -> None:
        self.progress.done(f"{self.level} {self.name}: {text}")

    def _choose(self, batch: int, ended: Batches) -> None:
        """The fixed splits that take part in the rounds: uniform DDP, and whoever may be the oracle."""
        assert self.search is not None
        size = self.gang.size
        self.splits["ddp"] = (batch // size,) * size
        finalists = [*self.search.fastest(2), self.search.best(lambda n: n < size), self.search.best(lambda n: n == 1)]
        # Where the policy ended is a split too, and may be the best.
        for split in dict.fromkeys([*finalists, ended]):
            if split is not None and split != self.splits["ddp"]:
                self.splits[show(split)] = split

    def _another(self, made: int, seconds: float) -> bool:
        """Whether there is another round after so many."""
        how = self.how
        if how.longest is not None and made >= ENOUGH and seconds >= how.longest:
            return False
        return made < how.rounds or seconds < how.seconds

    def _block(self, contestant: str) -> Trace:
        if contestant in self.splits:
            turn = self.gang.block(SPLITS, *self._fixed(self.splits[contestant]))
        elif contestant == AGAIN:
            turn = self.gang.block(AGAIN, *self._fixed(self.splits["ddp"]))
        else:
            turn = self.gang.block(contestant)
        return turn.after(self.how.skip)  # the same for all: how fast a step is depends on when it comes

    def _fixed(self, split: Batches) -> tuple[int, Batches]:
        """A block of steps with this split: fewer where they take seconds each."""
        assert self.search is not None
        fitting = int(LONG_BLOCK / self.search.curve.time(split))
        return min(self.how.block, max(fitting, self.how.skip + ENOUGH)), split

    # What came out

    def _median(self, contestant: str) -> float:
        return float(np.median(joined(self.rounds[contestant]).seconds))

    def _best(self, least: int, most: int) -> str | None:
        """The fastest split over so many workers, if one was worth measuring."""
        return min(self._over(least, most), key=self._median, default=None)

    def _over(self, least: int, most: int) -> list[str]:
        return [name for name, split in self.splits.items() if least <= oracle.active(split) <= most]

    def _ratio_to_best(self, contestant: str, fitting: Sequence[str]) -> dict[str, float]:
        """How many times faster ``contestant`` is than the best of these, round by round: than the one that was the
        fastest in the other rounds. The fastest of a round itself is that partly by luck."""
        own, *others = (
            np.array([np.median(turn.seconds) for turn in self.rounds[name]]) for name in (contestant, *fitting)
        )
        rounds, ratios = np.arange(len(own)), []
        for turn in rounds:
            elsewhere = rounds != turn if len(rounds) > 1 else slice(None)
            best = int(np.argmin([np.median(times[elsewhere]) for times in others]))
            ratios.append(float(others[best][turn] / own[turn]))
        return median_and_spread(ratios)

    def summary(self) -> dict[str, Any]:
        assert self.search is not None
        size = self.gang.size
        best, subset = self._best(1, size), self._best(1, size - 1)
        assert best is not None
        found: dict[str, Any] = {}
        for key, against in (
            ("speedup_vs_uniform", ["ddp"]),
            ("fraction_of_oracle", self._over(1, size)),
            ("vs_best_subset", self._over(1, size - 1)),
            ("vs_best_single", self._over(1, 1)),
        ):
            if not against:  # all of them predicted to be far slower, and left out
                found[key] = found[f"{key}_spread"] = None
                continue
            ratio = self._ratio_to_best("optimal", against)
            found[key], found[f"{key}_spread"] = ratio["median"], [ratio["lower"], ratio["upper"]]
        noise = self._ratio_to_best(AGAIN, ["ddp"])
        found["ddp_vs_itself"], found["ddp_vs_itself_spread"] = noise["median"], [noise["lower"], noise["upper"]]
        for key, stay in (("steps_to_90", False), ("steps_to_stay_at_90", True)):
            reached = [steps_to(trace.seconds, self._median(best), stay=stay) for trace in self.starts]
            found[key] = (
                None if None in reached or not reached else float(np.median([s for s in reached if s is not None]))
            )
        found["oracle"], found["best_subset"] = self.splits[best], self.splits[subset] if subset else None
        found["oracle_ms"] = 1e3 * self._median(best)
        found["others"] = {
            policy: {
                "speedup_vs_uniform": self._ratio_to_best(policy, ["ddp"])["median"],
                "fraction_of_oracle": self._ratio_to_best(policy, self._over(1, size))["median"],
            }
            for policy in self.how.policies
            if policy != "optimal"
        }
        curve = self.search.curve
        found["curves_ms"] = [[1e3 * a, 1e3 * b] for a, b in zip(curve.alpha, curve.beta, strict=True)]
        found["reduce_ms"] = (1e3 * curve.cost).tolist()
        found["plans"] = [f"{step}: {show(split)} {reason}" for step, split, reason in self.plans]
        found["rounds"] = len(self.rounds["optimal"])
        found["splits_tried"], found["sets_left_out"] = len(self.search.tried), self.search.left_out
        return found

    def _rows(self) -> list[Row]:
        best, subset = self._best(1, self.gang.size), self._best(1, self.gang.size - 1)
        rows = []
        fixed = [name for name in self.splits if name != "ddp"]
        for contestant in ("ddp", AGAIN, *self.how.policies, *fixed):
            name = contestant
            if contestant in self.splits and contestant != "ddp":
                name = "oracle" if contestant == best else "best subset" if contestant == subset else "fixed split"
            rows.append({"level": self.level, "workload": self.name, "contestant": name, **describe(
                joined(self.rounds[contestant]), self.gang.workload(self.name, self.size).global_batch
            )})  # fmt: skip
        return rows


def describe(trace: Trace, batch: int) -> Row:
    """Step time, throughput, split and balance of some steps."""
    times = median_and_spread(1e3 * trace.seconds)
    last = trace.batches[-1]
    return {
        "step_ms": times["median"],
        "lower": times["lower"],
        "upper": times["upper"],
        "samples_per_s": 1e3 * batch / times["median"],
        "batches": show(last),
        "parked": ",".join(str(k) for k, size in enumerate(last) if not size) or "–",
        "imbalance": imbalance(trace),
        "waiting": waiting(trace),
    }


def imbalance(trace: Trace) -> float | None:
    """The busiest worker over the mean of those that took part: 1 is balanced."""
    known = [row[~np.isnan(row)] for row in trace.busy if not np.isnan(row).all()]
    return float(np.median([row.max() / row.mean() for row in known])) if known else None


def waiting(trace: Trace) -> float | None:
    """The share of their time that workers which take part spend waiting."""
    busy, wait = np.nansum(trace.busy), np.nansum(trace.wait)
    return float(wait / (busy + wait)) if busy else None


def steps_to(seconds: Sequence[float] | Floats, best: float, near: float = NEAR, *, stay: bool = False) -> int | None:
    """The steps after which the speed (median of three) is ``near`` of the best, or ``stay``s there; None: never.

    >>> steps_to([4, 4, 1, 1, 9, 9, 1, 1], 1.0), steps_to([4, 4, 1, 1, 9, 9, 1, 1], 1.0, stay=True)
    (2, 6)
    """
    speeds = best / np.maximum(np.asarray(seconds, dtype=float), 1e-9)
    if len(speeds) < 3:
        return None
    good = np.median(np.lib.stride_tricks.sliding_window_view(speeds, 3), axis=1) >= near
    if not (good[-1] if stay else good.any()):
        return None
    first = len(good) - int(np.argmin(good[::-1])) if stay and not good.all() else int(np.argmax(good))
    return first + int(np.argmax(speeds[first:] >= near))  # a good median may begin with one more slow step
