"""From measurements to plans: the interface of all policies, and the three that fit no curves.

A policy is a pure function with a memory that it hands back: ``start(problem)`` gives the first state,
``update(problem, state, report)`` the next. Engines run it on one rank and send the state, which must be picklable, to
the others. ``state.plan`` is the plan to follow, ``state.interval`` the number of steps until the next report is
wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from omnilearn.control.problem import Floats, Ints, Plan, Problem
from omnilearn.control.split import apportion
from omnilearn.errors import InfeasibleError


@dataclass(frozen=True)
class Report:
    """What all workers measured since the last report: one row per step, one column per worker.

    ``busy``: seconds from the end of one reduction to the worker's last own gradient of the next step: all that
    depends on the worker and its batch. ``wait``: from there to the end of the reduction. ``measured`` is False where
    a worker has no timing for a step. ``pulse``: a parked worker's speed now, relative to shortly after it was parked
    (1: unchanged, or not known).
    """

    batches: Ints
    busy: Floats
    wait: Floats
    measured: npt.NDArray[np.bool_]
    pulse: Floats

    @staticmethod
    def of(
        batches: npt.ArrayLike,
        busy: npt.ArrayLike,
        wait: npt.ArrayLike | None = None,
        measured: npt.ArrayLike | None = None,
        pulse: npt.ArrayLike | None = None,
    ) -> Report:
        """A checked report; single rows may be given without the outer dimension."""
        b, t = (
            np.atleast_2d(np.asarray(batches, dtype=np.int64)),
            np.atleast_2d(np.asarray(busy, dtype=np.float64)),
        )
        w = np.zeros_like(t) if wait is None else np.atleast_2d(np.asarray(wait, dtype=np.float64))
        m = b > 0 if measured is None else np.atleast_2d(np.asarray(measured, dtype=bool)) & (b > 0)
        p = np.ones(b.shape[1]) if pulse is None else np.asarray(pulse, dtype=np.float64)
        if not b.shape == t.shape == w.shape == m.shape or p.shape != b.shape[1:]:
            raise InfeasibleError(
                f"a report's parts differ in shape: {b.shape}, {t.shape}, {w.shape}, {m.shape}, {p.shape}"
            )
        bad = m & ~(np.isfinite(t) & (t > 0) & np.isfinite(w) & (w >= 0))
        if bad.any():
            row, k = (int(i) for i in np.argwhere(bad)[0])
            raise InfeasibleError(
                f"worker {k}: timings must be finite and positive, got busy={t[row, k]} and wait={w[row, k]} s for "
                f"a batch of {b[row, k]}: leave it out with measured=False"
            )
        if not np.all(np.isfinite(p) & (p > 0)):
            raise InfeasibleError(f"pulses must be finite and positive, got {p.tolist()}")
        return Report(b, t, w, m, p)

    @property
    def heard(self) -> Report:
        """Without the steps that nobody measured: the first one of an epoch."""
        some = self.measured.any(axis=1)
        if some.all():
            return self
        return Report(self.batches[some], self.busy[some], self.wait[some], self.measured[some], self.pulse)

    @staticmethod
    def joined(reports: Sequence[Report]) -> Report:
        """One after the other, with the pulses of the last."""
        batches, busy, wait, measured = (
            np.concatenate([getattr(report, part) for report in reports])
            for part in ("batches", "busy", "wait", "measured")
        )
        return Report(batches, busy, wait, measured, reports[-1].pulse)


@dataclass(frozen=True)
class State:
    """A policy's memory. Policies with more to remember extend it."""

    plan: Plan
    interval: int = 5

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists: what a checkpoint saves."""
        return {"batches": list(self.plan.batches), "reason": self.plan.reason}


@runtime_checkable
class Policy(Protocol):
    """How batches are chosen. Give one by name (``policy="optimal"``) or as an object (``policy=MyPolicy()``)."""

    def start(self, problem: Problem) -> State:
        """The first plan, before anything is measured."""
        ...

    def update(self, problem: Problem, state: State, report: Report) -> State:
        """The state after a report. Keep ``state.plan`` where nothing should change."""
        ...

    def restore(self, problem: Problem, saved: dict[str, Any]) -> State:
        """The state that ``state_dict`` saved, for the same number of workers."""
        ...


def share(problem: Problem, weights: Floats) -> Ints:
    """Batches in the ratio of ``weights`` within the problem's bounds, over all workers."""
    low, high = problem.units
    total = problem.global_batch // problem.multiple_of
    if int(low.sum()) > total:
        raise InfeasibleError(
            f"global_batch {problem.global_batch} is below the sum of the workers' minimums "
            f"{int(low.sum()) * problem.multiple_of}: raise global_batch, lower min_batch, or use policy='optimal', "
            f"which can park workers"
        )
    return apportion(weights, total, low, high) * problem.multiple_of


def median(values: Sequence[float]) -> float:
    """
    >>> median([3, 1, 2]), median((1, 2))
    (2.0, 1.5)
    """
    # The first np.median imports numpy.ma, which takes as long as many a step.
    ordered, n = sorted(values), len(values)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def as_plan(batches: Ints, reason: str, predicted: float | None = None, instead_of: float | None = None) -> Plan:
    return Plan(tuple(np.asarray(batches).tolist()), reason, predicted, instead_of)


def saved_plan(problem: Problem, saved: dict[str, Any]) -> Plan | None:
    """The plan that was saved, or None where it is no split of this problem: batch or bounds may be others now."""
    batches = np.asarray(saved["batches"], dtype=np.int64)
    if batches.shape != (problem.workers,):
        raise InfeasibleError(
            f"the state was saved with {batches.size} workers, now there are {problem.workers}: begin with start()"
        )
    try:
        problem.check(batches)
    except InfeasibleError:
        return None
    return as_plan(batches, saved["reason"])


@dataclass(frozen=True)
class Uniform:
    """Everybody the same: what plain data parallelism does. The baseline."""

    def start(self, problem: Problem) -> State:
        return State(as_plan(share(problem, np.ones(problem.workers)), "uniform"), interval=100)

    def update(self, problem: Problem, state: State, report: Report) -> State:
        return state

    def restore(self, problem: Problem, saved: dict[str, Any]) -> State:
        return self.start(problem)


@dataclass(frozen=True)
class Static(Uniform):
    """Once, in the ratio of nominal speeds: core counts or FLOP/s (ACSOS 2020, variable batching)."""

    def start(self, problem: Problem) -> State:
        return State(as_plan(share(problem, problem.speeds), "nominal speeds"), interval=100)


@dataclass(frozen=True)
class _Averages(State):
    """Sums over the interval so far: seconds per worker, measured steps per worker, and steps."""

    seconds: tuple[float, ...] = ()
    measured: tuple[int, ...] = ()
    steps: int = 0


@dataclass(frozen=True)
class Proportional:
    """The papers' controller (ACSOS 2020, "Mini-batch Size Controller"; OmniLearn 2025, dynamic batching).

    ``Δb_k = −X_k·(t_k − t̄)`` with throughput ``X_k = b_k/t_k``, times averaged over ``every`` steps and t̄ their mean
    over the workers. Changes below the dead-band are not made. The result is brought back within the bounds and to
    the same global batch. It never parks. ``every`` as large as an epoch is the authors' prototype.
    """

    every: int = 5
    dead_band: float = 0.05
    first: str = "static"

    def start(self, problem: Problem) -> State:
        first = share(problem, problem.speeds if self.first == "static" else np.ones(problem.workers))
        return self._from(as_plan(first, "start"))

    def _from(self, plan: Plan) -> _Averages:
        nothing = len(plan.batches)
        return _Averages(plan, min(self.every, 5), (0.0,) * nothing, (0,) * nothing, 0)

    def update(self, problem: Problem, state: State, report: Report) -> State:
        assert isinstance(state, _Averages)
        b = state.plan.sizes
        own = report.batches == b  # not the tail of an epoch, nor steps of the plan before
        rows = report.measured & own
        seconds = np.asarray(state.seconds) + np.where(rows, report.busy, 0).sum(axis=0)
        measured = np.asarray(state.measured) + rows.sum(axis=0)
        steps = state.steps + int(own.all(axis=1).sum())
        if steps < self.every or measured.min() < min(self.every, 2):
            return replace(state, seconds=tuple(seconds.tolist()), measured=tuple(measured.tolist()), steps=steps)
        wanted = b + correction(b, seconds / measured)
        if np.max(np.abs(wanted - b) / b) < self.dead_band:
            return self._from(state.plan)
        batches = share(problem, np.maximum(wanted, 1e-9))
        if np.array_equal(batches, b):
            return self._from(state.plan)
        return self._from(as_plan(batches, "proportional control"))

    def restore(self, problem: Problem, saved: dict[str, Any]) -> State:
        plan = saved_plan(problem, saved)
        if plan is None or plan.parked:
            plan = as_plan(share(problem, np.maximum(saved["batches"], 1e-9)), "restored")
        return self._from(plan)


def correction(batches: npt.ArrayLike, seconds: npt.ArrayLike) -> Floats:
    """The papers' ``Δb_k = −X_k·(t_k − t̄)``, before rounding and bounds.

    Their two-worker example: equal batches, one worker twice as slow.

    >>> correction([32, 32], [1.0, 2.0]).tolist()
    [16.0, -8.0]
    """
    b, t = np.asarray(batches, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    return np.asarray(-(b / t) * (t - t.mean()))
