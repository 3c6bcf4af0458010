"""A job on a cluster that changes, decided about without machines: the papers' climb, step by step.

A policy hears here what the engine would tell it: reports after as many steps as it asks for, plans in force a step
later, nothing of the first steps with a new batch, which are slower, and of the parked a look now and then. Lines
and costs are close to what was measured (``docs/results``); noise is each worker's own and common to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnilearn.bench.clusters import Cluster, Floats
from omnilearn.cluster.emulation import LEVELS
from omnilearn.control import Policy, Report
from omnilearn.engine.planner import GROWING, Sizes
from omnilearn.engine.pulse import Beat

CLIMB = ("HL1", "HL2", "HL4", "HL8", "HL4", "HL2", "HL1")
COMMON = 0.5
"""How much all workers' noise is in common, relative to each one's own."""
NEW = 1.15
"""How much longer a step with a new batch takes."""
LOOK = 0.1
"""The noise of a look at a parked worker."""
NEAR, TOGETHER = 0.9, 3
"""Near the optimum is who reaches this part of its speed, in the median of so many steps."""


@dataclass(frozen=True)
class Climb:
    """A workload on the cores of a machine that plays the levels. ``scaling``: how a worker's lines follow its cores;
    with threads the fixed part stays."""

    name: str
    alpha: float
    beta: float
    reduce_cost: tuple[float, ...]
    global_batch: int
    cores: float
    threads: float | None = None

    def at(self, level: str) -> Cluster:
        shares = np.array(LEVELS["sync"][level], dtype=float)
        cores = shares * self.cores / shares.sum()
        speed = cores if self.threads is None else np.maximum(np.floor(cores + 0.1), 1) ** self.threads
        fixed = self.alpha / (cores if self.threads is None else np.ones_like(cores))
        beta = tuple((self.beta / speed).tolist())
        return Cluster(f"{self.name}, {level}", tuple(fixed.tolist()), beta, self.reduce_cost, self.global_batch)


CLIMBS: tuple[Climb, ...] = (
    Climb("small CNN, 2 cores", 0.0077, 0.00168, (0, 0, 0.010, 0.020, 0.030), 128, 2),
    Climb("3 conv layers, 2 cores", 0.004, 0.0027, (0, 0, 0.010, 0.020, 0.030), 64, 2),
    Climb("4.2M-parameter MLP, 2 cores", 0.0174, 0.00025, (0, 0, 0.100, 0.150, 0.200), 64, 2),
    Climb("ResNet-18, 16 cores", 0.045, 0.015, (0, 0, 0.03, 0.04, 0.045), 64, 16, 0.9),
    Climb("ResNet-50, 16 cores", 0.060, 0.040, (0, 0, 0.06, 0.075, 0.09), 32, 16, 0.8),
    Climb("AlexNet, 16 cores", 0.050, 0.008, (0, 0, 0.16, 0.19, 0.22), 64, 16, 0.85),
    Climb("GPT-2 small, 16 cores", 0.35, 0.30, (0, 0, 0.45, 0.55, 0.65), 16, 16, 0.85),
)


class _Parked:
    """The looks at those who are parked."""

    def __init__(self, workers: int, random: np.random.Generator) -> None:
        self._beats: list[Beat | None] = [None] * workers
        self._last, self._random = [0.0] * workers, random

    def pass_time(self, clock: float, on: Sequence[bool], speeds: Floats) -> None:
        for k, acts in enumerate(on):
            if acts:
                self._beats[k] = None
                continue
            beat = self._beats[k]
            if beat is None:
                self._beats[k], self._last[k] = Beat(), clock
            elif clock - self._last[k] >= beat.pause:
                self._last[k] = clock
                looks = speeds[k] * (1 + LOOK * self._random.standard_normal(beat.repeats))
                beat.compare(float(np.median(looks)))

    @property
    def pulse(self) -> list[float]:
        return [1.0 if beat is None else beat.ratio for beat in self._beats]


def travel(stages: Sequence[Cluster], policy: Policy, steps: int, noise: float = 0.06, seed: int = 0) -> Floats:
    """The speed of every step as a part of the optimum's: stages × steps."""
    random, problem = np.random.default_rng(seed), stages[0].problem
    workers = problem.workers
    state = policy.start(problem)
    batches, coming = np.array(state.plan.batches), list[tuple[int, tuple[int, ...]]]()
    sizes, parked = [Sizes(GROWING) for _ in range(workers)], _Parked(workers, random)
    unsaid: list[tuple[Floats, Floats, Floats, Floats]] = []
    pace, clock = np.empty((len(stages), steps)), 0.0
    for step in range(len(stages) * steps):
        cluster = stages[step // steps]
        if coming and step >= coming[0][0]:
            batches = np.array(coming.pop(0)[1])
        on = batches > 0
        tells = np.array([acts and own.tells(int(b)) for acts, own, b in zip(on, sizes, batches, strict=True)])
        own = noise * (random.standard_normal(workers) + COMMON * random.standard_normal())
        busy = (np.asarray(cluster.alpha) + np.asarray(cluster.beta) * batches) * np.maximum(1 + own, 0.5)
        busy = np.where(on, busy * np.where(tells, 1.0, NEW), 0.0)
        reduction = cluster.reduce_cost[int(on.sum())] * max(1 + noise * random.standard_normal(), 0.5)
        seconds = float(busy.max()) + reduction
        pace[divmod(step, steps)] = cluster.optimum / seconds
        clock += seconds
        unsaid.append((batches, np.where(on, busy, 1.0), np.where(on, seconds - busy, 0.0), tells))
        parked.pass_time(clock, on.tolist(), 1 / np.asarray(cluster.beta))
        if len(unsaid) >= state.interval:
            batches_of, busy_of, wait_of, measured = (np.array(rows) for rows in zip(*unsaid, strict=True))
            report = Report.of(batches_of, busy_of, wait_of, measured, parked.pulse)
            unsaid, before = [], state.plan
            state = policy.update(problem, state, report)
            if state.plan.batches != before.batches:
                coming.append((step + 2, state.plan.batches))
    return pace


def steps_to_near(pace: Floats) -> list[int | None]:
    """For every stage the steps after which the pace is near the optimum's; None: it never was.

    >>> steps_to_near(np.array([[0.5, 0.5, 1.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5, 0.5]]))
    [2, None]
    """
    windows = np.median(np.lib.stride_tricks.sliding_window_view(pace, TOGETHER, axis=1), axis=-1) >= NEAR
    first = windows.argmax(axis=1)
    return [
        int(k + np.argmax(own[k:] >= NEAR)) if found.any() else None  # of those three, the first that is near itself
        for k, found, own in zip(first, windows, pace, strict=True)
    ]
