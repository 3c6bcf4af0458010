"""Batches for whoever is here, from the timings that come with the gradients. The policies of ``control`` decide."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from omnilearn.cluster.resources import Resources, speeds
from omnilearn.control import Plan, Policy, Problem, Report, State
from omnilearn.engine.planner import Sizes

log = logging.getLogger("omnilearn")

SPAN = 0.2
"""Seconds of steps that are thought about together, at least: one of some milliseconds says little."""


class Planning:
    """One plan for all workers, without a barrier: a worker follows it from its next lease on."""

    def __init__(self, policy: Policy, make_problem: Callable[[Sequence[float]], Problem]) -> None:
        self._policy, self._make_problem = policy, make_problem
        self._ranks: tuple[int, ...] = ()
        self._resources: dict[int, Resources] = {}
        self._rates: dict[int, float] = {}  # samples per second, measured
        self._rows: dict[int, list[tuple[int, float]]] = {}
        self._sizes: dict[int, Sizes] = {}
        self.state: State | None = None
        self.problem: Problem | None = None
        self.changes = 0

    def roster(self, present: dict[int, Resources]) -> None:
        """Plan for these workers from now on: by measured speeds, and nominal ones for those not measured yet.

        Raises InfeasibleError, and changes nothing, where the global batch is too small for so many.
        """
        if not present:
            self._ranks = ()
            return
        ranks = tuple(sorted(present))
        nominal = dict(zip(ranks, _speeds([present[rank] for rank in ranks]), strict=True))
        known = [self._rates[rank] / nominal[rank] for rank in ranks if rank in self._rates]
        pace = float(np.median(known)) if known else 1.0
        problem = self._make_problem([self._rates.get(rank, nominal[rank] * pace) for rank in ranks])
        self.state, self.problem = self._policy.start(problem), problem
        self._ranks, self._resources = ranks, dict(present)
        self._rows = {rank: [] for rank in ranks}
        self.changes += 1

    def restore(self, saved: dict[str, object]) -> None:
        """Go on from a checkpoint's plan, where it was made by the same policy for as many workers."""
        if self.problem is None or saved.get("workers") != len(self._ranks):
            return
        if saved.get("kind") == type(self._policy).__name__:
            self.state = self._policy.restore(self.problem, saved)
            self.changes += 1

    def saved(self) -> dict[str, object]:
        assert self.state is not None
        return {"workers": len(self._ranks), "kind": type(self._policy).__name__, **self.state.state_dict()}

    def record(self, rank: int, batch: int, seconds: float) -> None:
        """A worker needed so long for a step, from one answer to the next."""
        if rank not in self._rows or self.state is None or self.problem is None or not (batch > 0 < seconds < 1e6):
            return
        if not self._sizes.setdefault(rank, Sizes()).tells(batch):
            return
        before = self._rates.get(rank)
        self._rates[rank] = batch / seconds if before is None else 0.7 * before + 0.3 * batch / seconds
        self._rows[rank].append((batch, seconds))
        enough = sum(map(len, self._rows.values())) >= max(self.state.interval, 1) * len(self._ranks)
        if enough and max(sum(took for _, took in steps) for steps in self._rows.values()) >= SPAN:
            plan = self.state.plan
            self.state = self._policy.update(self.problem, self.state, self._report())
            self._rows = {rank: [] for rank in self._ranks}
            if self.state.plan.batches != plan.batches or self.state.plan.reason != plan.reason:
                self.changes += 1

    def _report(self) -> Report:
        """What was measured, in rows; workers make different numbers of steps, so that some rows have gaps."""
        rows = max(len(steps) for steps in self._rows.values())
        batches = np.tile(self.plan.sizes, (rows, 1))
        seconds, measured = np.ones(batches.shape), np.zeros(batches.shape, dtype=bool)
        for k, rank in enumerate(self._ranks):
            for row, (batch, took) in enumerate(self._rows[rank]):
                batches[row, k], seconds[row, k], measured[row, k] = batch, took, True
        return Report.of(batches, seconds, measured=measured)

    @property
    def plan(self) -> Plan:
        assert self.state is not None
        return self.state.plan

    @property
    def by_rank(self) -> Plan:
        """The plan with one place per rank; ranks that are not here have 0."""
        batches = [0] * (max(self._ranks, default=-1) + 1)
        for rank, batch in zip(self._ranks, self.plan.batches, strict=True):
            batches[rank] = batch
        plan = self.plan
        return Plan(tuple(batches), plan.reason, plan.predicted, plan.instead_of)

    def batch(self, rank: int) -> int:
        return self.plan.batches[self._ranks.index(rank)] if rank in self._ranks else 1

    def rates(self, ranks: Sequence[int]) -> list[float]:
        """Their speeds: samples per second where all were measured, else the nominal ones."""
        if all(rank in self._rates for rank in ranks):
            return [self._rates[rank] for rank in ranks]
        return list(_speeds([self._resources[rank] for rank in ranks if rank in self._resources]))

    @property
    def mean_share(self) -> float:
        """What a worker has on average: the batch that the learning rate is meant for."""
        return sum(self.plan.batches) / max(len(self._ranks), 1)


def _speeds(workers: Sequence[Resources]) -> tuple[float, ...]:
    if all(worker.device == "cpu" for worker in workers):
        return speeds(workers)
    return tuple(worker.flops or 1.0 for worker in workers)
