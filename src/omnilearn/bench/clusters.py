"""Clusters to decide about without having them: step-time lines close to ones that were measured.

Each line reproduces measured step times of a real machine or of a part of one (CPU quotas, MPS shares), good enough
to compare policies on. Used by ``omnilearn bench control`` and by the tests of control/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from omnilearn.control import Policy, Problem, Report, State, allocate, step_time

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cluster:
    """Workers with known lines (seconds, seconds per sample) and a known cost of reducing over n of them."""

    name: str
    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    reduce_cost: tuple[float, ...]
    global_batch: int

    @property
    def problem(self) -> Problem:
        return Problem.of(self.global_batch, workers=len(self.alpha))

    def slowed(self, worker: int, factor: float) -> Cluster:
        def scale(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(v * factor if k == worker else v for k, v in enumerate(values))

        return Cluster(self.name, scale(self.alpha), scale(self.beta), self.reduce_cost, self.global_batch)

    def time(self, batches: npt.ArrayLike) -> float:
        return step_time(batches, self.alpha, self.beta, self.reduce_cost)

    @cached_property
    def optimum(self) -> float:
        return self.time(allocate(self.problem, self.alpha, self.beta, self.reduce_cost))

    def run(self, batches: npt.ArrayLike, steps: int, noise: float, random: np.random.Generator) -> Report:
        """What the workers would report of so many steps."""
        b = np.asarray(batches)
        on = b > 0

        def noisy(shape: tuple[int, int]) -> Floats:
            return np.clip(1 + noise * random.standard_normal(shape), 0.3, None)

        busy = np.where(on, (np.asarray(self.alpha) + np.asarray(self.beta) * b) * noisy((steps, len(b))), 1.0)
        last = np.max(busy, axis=1, keepdims=True, where=on, initial=0.0)
        reduction = self.reduce_cost[int(on.sum())] * noisy((steps, 1))
        return Report.of(np.tile(b, (steps, 1)), busy, np.where(on, last - busy + reduction, 0.0))


def _quotas(name: str, fixed: float, per_sample: float, reduce_cost: tuple[float, ...], global_batch: int) -> Cluster:
    """Four workers with CPU quotas of 0.225, 0.225, 0.15 and 1.2 cores; costs in core-seconds."""
    quotas = (0.225, 0.225, 0.15, 1.2)
    return Cluster(
        name,
        tuple(fixed / q for q in quotas),
        tuple(per_sample / q for q in quotas),
        reduce_cost,
        global_batch,
    )


CLUSTERS = (
    Cluster(
        "GPU cut 12/12/8/64%",
        (0.019,) * 4,
        tuple(0.00014 / share for share in (0.12, 0.12, 0.08, 0.64)),
        (0, 0, 0.010, 0.015, 0.020),
        512,
    ),
    Cluster("GPU + 12 cores", (0.0195, 0.116), (0.0000165, 0.00299), (0, 0, 0.020), 128),
    Cluster(
        "cores 2/2/1/11",
        (0.042, 0.042, 0.067, 0.0335),
        (0.00179, 0.00179, 0.00357, 0.00040),
        (0, 0, 0.010, 0.015, 0.020),
        128,
    ),
    _quotas("quotas, small CNN", 0.0077, 0.00168, (0, 0, 0.010, 0.020, 0.030), 128),
    _quotas("quotas, 3 conv layers", 0.004, 0.0027, (0, 0, 0.010, 0.020, 0.030), 64),
    _quotas("quotas, 4.2M-parameter MLP", 0.0174, 0.00025, (0, 0, 0.100, 0.150, 0.200), 64),
)


@dataclass(frozen=True)
class Replan:
    """One update of a policy: what fraction of the optimum was in force before it, and whether it changed the plan."""

    fraction: float
    changed: bool
    state: State


def simulate(
    cluster: Cluster,
    policy: Policy,
    replans: int,
    *,
    steps: int = 5,
    noise: float = 0.05,
    seed: int = 0,
    at: Callable[[int, Cluster], Cluster] = lambda replan, cluster: cluster,
) -> list[Replan]:
    """Run ``policy`` on ``cluster`` with a report every ``steps`` steps; ``at`` may change it before a re-plan."""
    random, problem = np.random.default_rng(seed), cluster.problem
    state = policy.start(problem)
    history = []
    for replan in range(replans):
        cluster = at(replan, cluster)
        report = cluster.run(state.plan.batches, steps, noise, random)
        after = policy.update(problem, state, report)
        fraction = cluster.optimum / cluster.time(state.plan.batches)
        history.append(Replan(fraction, after.plan.batches != state.plan.batches, after))
        state = after
    return history
