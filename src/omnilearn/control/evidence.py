"""What the default policy knows, and how a report becomes part of it. Decides nothing.

To think takes milliseconds, and many more on a slow worker: once a plan has settled, reports that say what was
expected are only kept, and taken in several at a time. One that surprises is taken in at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from omnilearn.control.curves import GATE, GATE_FLOOR, LEAP, Curves
from omnilearn.control.policy import Report, State, median
from omnilearn.control.problem import Floats, Ints, Plan, Problem
from omnilearn.control.subsets import Workers

LONGEST_TRIAL = 8
QUICKER = 0.9
"""A set surprises when it needs less than this part of what its workers' lines had said."""
REFUTED = 50
"""Steps for which a set of workers that was slower is not tried again, at least."""
ENTRIES = 4
"""Of a report, at most: a few medians say as much as many steps that were alike."""
SETTLED = 4
"""Reports after which a plan that still holds has settled."""
AT_ONCE = 4
"""Reports that are taken in together, where none of them surprises…"""
SURPRISE = 3.0
"""… by medians further from what was expected than so many standard deviations of one measurement."""


@dataclass(frozen=True)
class Trial:
    """A set of workers being tried, against the measured step time of the plan before."""

    before: Plan
    baseline: float
    steps: int  # that the baseline is of
    rebalances: int = 2


@dataclass(frozen=True)
class Refuted:
    """A set of workers that was tried and was slower: when it may be tried again, and how often it failed."""

    since: int
    until: int
    failures: int
    seconds: float  # what a step took
    predicted: float  # what it should have taken, by the curves after it
    promised: float = 0.0  # and by those before it

    @property
    def surprised(self) -> bool:
        """It was slower than with others, and yet much quicker than the lines had said."""
        return self.seconds < QUICKER * self.promised

    def moved(self, steps: int) -> Refuted:
        """The same in a count of steps that is so much ahead."""
        return replace(self, since=self.since + steps, until=self.until + steps)

    def stands(self, step: int, times: tuple[float, ...], predicted: float) -> bool:
        """Neither has enough time passed, nor has the present plan, by its step times, become the slower one.

        ``predicted``: what a step with these workers should take now: their speeds may have changed. That is believed
        after a while, or at once where it is much quicker than the lines ever said. After a second failure it is not
        any more; perhaps they are always slower without the others.
        """
        before = min(self.promised, self.predicted)
        quicker = predicted < QUICKER * before
        changed = self.failures == 1 and (quicker or step >= self.since + REFUTED)
        seconds = self.seconds * (predicted / (before if quicker else self.predicted) if changed else 1.0)
        return step < self.until and not (times and median(times) > 1.1 * seconds)


@dataclass(frozen=True)
class OptimalState(State):
    curves: Curves = field(default_factory=lambda: Curves.guess([1.0]))
    reduce_cost: tuple[float | None, ...] = ()  # measured, by number of active workers
    alone: float = 1.0  # what a worker needed alone, as a part of what its line says
    steps: int = 0
    times: tuple[float, ...] = ()  # last measured step times of the current plan
    excitements: int = 0
    settled: int = 0  # reports since the plan, or a worker's speed, last changed
    since: int = 0  # the step of that
    trial: Trial | None = None
    refuted: tuple[tuple[Workers, Refuted], ...] = ()
    changed_at: int = 0  # step at which the set of workers last changed
    price: float = 0.0  # what the last trial cost, in steps
    pulse: tuple[float, ...] = ()  # pulses that are in the curves already
    unread: tuple[Report, ...] = ()  # reports that said what was expected, not taken in yet

    @property
    def undisturbed(self) -> float:
        """What a worker needs alone, as a part of what its line says: reducing no longer takes from its own time.

        Its line stays that of acting together. Only where it needs more than its line says, the line is bent.
        """
        return min(self.alone, 1.0)

    def expected(self, batches: Ints) -> Floats:
        """Every worker's own seconds for these batches."""
        times = self.curves.times(batches)
        return times * self.undisturbed if np.count_nonzero(batches) == 1 else times

    def __getstate__(self) -> dict[str, Any]:
        """What others are told: not what is still to be thought about."""
        return {**self.__dict__, "unread": ()}

    def state_dict(self) -> dict[str, Any]:
        kept = self if self.trial is None else replace(self, plan=self.trial.before, trial=None)  # not judged yet
        return {
            **State.state_dict(kept),
            "curves": self.curves.state_dict(),
            "reduce_cost": list(self.reduce_cost),
            "alone": self.alone,
            "refuted": [[list(workers), asdict(found.moved(-self.steps))] for workers, found in self.refuted],
        }


def take_in(problem: Problem, state: OptimalState, report: Report) -> tuple[OptimalState, bool]:
    """The state with the report in it, and whether there is anything to think about."""
    expected = _as_expected(problem, state, report)
    if expected and len(state.unread) + 1 < AT_ONCE:
        return replace(state, unread=(*state.unread, report)), False
    together: Sequence[tuple[Report, ...]] = [(*state.unread, report)] if expected else [state.unread, (report,)]
    state = replace(state, curves=replace(state.curves, micro=problem.micro), unread=())
    for reports in filter(None, together):
        state = _absorb(state, Report.joined(reports))
    return state, True


def _as_expected(problem: Problem, state: OptimalState, report: Report) -> bool:
    """Whether the report says nothing that the settled plan and the curves do not."""
    curves, batches = state.curves, state.plan.sizes
    if state.trial or state.settled < SETTLED or not state.times or not _same(curves.micro, problem.micro):
        return False
    on, heard = batches > 0, report.heard
    alike = heard.measured.size and np.all(report.batches == batches) and heard.measured[:, on].all()
    if not alike or np.any(np.where(on, 1.0, report.pulse) != state.pulse):
        return False
    busy, step = heard.busy[:, on], (heard.busy + heard.wait)[:, on].max(axis=1)
    noise, before = curves.noise[on], sorted(state.times)[len(state.times) // 2]
    expected = state.expected(batches)[on]
    error = np.abs(np.sort(busy, axis=0)[len(busy) // 2] / expected - 1)
    slower = abs(np.sort(step)[len(step) // 2] / before - 1)
    # The last step may be the first of something new.
    latest = np.abs(busy[-1] / expected - 1)
    return bool(
        np.all(error < SURPRISE * noise)
        and slower < max(SURPRISE * noise.max(), GATE_FLOOR / 2)
        and np.all(latest < np.maximum(GATE * noise, GATE_FLOOR))
    )


def _same(a: Ints | None, b: Ints | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _absorb(state: OptimalState, report: Report) -> OptimalState:
    """Curves, reduction cost and step times with the report's measurements in them."""
    steps, report = len(report.batches), _condensed(report.heard)
    curves, cost, times = state.curves, list(state.reduce_cost), list(state.times)
    # A pulse is relative to when the worker was parked: what an earlier report said of it is in its curve already.
    pulse = np.where(state.plan.sizes > 0, 1.0, report.pulse)
    speeding = pulse / np.where(state.plan.sizes > 0, 1.0, np.asarray(state.pulse or (1.0,)))
    if np.any(speeding != 1):
        curves = curves.scaled(1 / speeding)
        # A reduction waits for its slowest member too: with members that are faster now it takes less.
        faster = max(float(speeding.max()), 1.0) * min(float(speeding.min()), 1.0)
        cost = [c if c is None or n <= len(state.plan.active) else c / faster for n, c in enumerate(cost)]
    for batches, busy, wait, measured in zip(report.batches, report.busy, report.wait, report.measured, strict=True):
        n = int((batches > 0).sum())
        own, leap = busy, LEAP
        if n == 1 == measured.sum():
            if state.trial and np.array_equal(batches, state.plan.sizes):  # mean over the trial
                ratio = float(busy[measured][0] / curves.times(batches)[measured][0])
                state = replace(state, alone=state.alone + (ratio - state.alone) / (len(times) + 1))
                leap = 1.0
            own = busy / state.undisturbed
        changes, curves = curves.changes, curves.observe(np.where(measured, batches, 0), own, leap=leap)
        if np.any(curves.changes > changes):
            times = []  # those of other speeds
        if not 0 < n == measured.sum():
            continue
        step = float((busy + wait)[measured].max())
        steady = bool(np.all(curves.suspect[measured] == 1)) and np.array_equal(curves.changes, changes)
        if steady or cost[n] is None:
            # What acting together adds to the slowest worker's expected time: the reduction, and that every worker is
            # late now and then.
            together = max(step - float(curves.times(batches)[measured].max()), 0.0) if n > 1 else 0.0
            known = cost[n]
            cost[n] = together if known is None or n == 1 else known + 0.2 * min(together - known, known + 0.1 * step)
            # Fewer workers never cost more than many do. A trial is too short to tell that many cost more, too.
            most = min(c for c in (cost[n:] if state.trial else cost[n : n + 1]) if c is not None)
            cost[1 : n + 1] = [c if c is None else min(c, most) for c in cost[1 : n + 1]]
        if np.array_equal(batches, state.plan.sizes):
            times.append(step)
    changed = not np.array_equal(curves.changes, state.curves.changes)
    return replace(
        state,
        curves=curves,
        reduce_cost=tuple(cost),
        times=tuple(times[-LONGEST_TRIAL:]),
        settled=0 if changed else state.settled,
        since=state.steps if changed else state.since,
        steps=state.steps + steps,
        pulse=tuple(pulse.tolist()),
    )


def _condensed(report: Report) -> Report:
    """A long report of steps that were all alike, as the medians of ENTRIES groups of them: quicker to take in."""
    batches, measured = report.batches, report.measured
    if len(batches) < 2 * ENTRIES or np.any(batches != batches[0]) or np.any(measured != measured[0]):
        return report
    each = len(batches) // ENTRIES
    own, all_of_it = report.busy[-each * ENTRIES :], (report.busy + report.wait)[-each * ENTRIES :]
    ordered = np.sort(np.stack([own, all_of_it]).reshape(2, ENTRIES, each, -1), axis=2)
    busy, whole = (ordered[:, :, (each - 1) // 2] + ordered[:, :, each // 2]) / 2
    return Report.of(
        batches[:ENTRIES], busy, np.maximum(whole - busy, 0.0), measured=measured[:ENTRIES], pulse=report.pulse
    )


def nominal(problem: Problem, state: OptimalState) -> Curves:
    """The curves, with those of workers never measured at the pace that the measured ones have for their speeds."""
    curves, batches = state.curves, state.plan.sizes
    unseen, on = curves.seen == 0, batches > 0
    if not unseen.any():
        return curves
    pace = median((curves.times(batches)[on] / batches[on] * problem.speeds[on]).tolist())
    return replace(curves, beta=np.where(unseen, pace / problem.speeds, curves.beta))
