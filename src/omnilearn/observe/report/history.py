"""A whole run as arrays: what a report asks of it. ``load`` makes it; figures and words ask it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from omnilearn.observe.board import Worker
from omnilearn.observe.events import Event

Floats = npt.NDArray[np.float64]

NAN = float("nan")
COLUMNS = (
    "t", "step", "steps", "measured", "batch",
    "busy_min", "busy_lower", "busy_median", "busy_upper", "busy_max", "busy",
    "wait_median", "wait", "data", "loss_min", "loss", "loss_max", "staleness_max", "staleness", "memory",
)  # fmt: skip
AT = {name: i for i, name in enumerate(COLUMNS)}
STEADY = 3
"""A plan that is shown as "after" has at least so many measured steps, if there is any such plan."""


class Rows:
    """One worker's steps and windows of steps: ``rows["busy"]`` is a column. A step's own row has steps = 1."""

    def __init__(self, table: Floats) -> None:
        self.table = table

    def __getitem__(self, name: str) -> Floats:
        return self.table[:, AT[name]]

    def __len__(self) -> int:
        return len(self.table)

    def where(self, mask: npt.NDArray[np.bool_]) -> Rows:
        return Rows(self.table[mask])

    @property
    def measured(self) -> Rows:
        return self.where((self["measured"] > 0) & (self["batch"] > 0))

    def between(self, phase: Phase) -> Rows:
        """Steps of a plan; windows are the plan's in which they begin."""
        place = self[phase.axis]
        return self.where((place >= phase.first) & (place < phase.end))

    def total(self, name: str) -> float:
        """Over all measured steps."""
        rows = self.measured
        return float(np.nansum(rows["measured"] * rows[name])) if len(rows) else 0.0

    def quantiles(self, name: str, at: Sequence[float] = (0, 0.25, 0.5, 0.75, 1)) -> Floats:
        """Of a time, over measured steps; a window counts by its five quartiles, with the weight of its steps."""
        rows = self.measured
        parts = [f"{name}_{p}" for p in ("min", "lower", "median", "upper", "max")]
        values = np.concatenate([rows[p] for p in parts])
        weights = np.tile(rows["measured"], len(parts))
        known = np.isfinite(values)
        if not known.any():
            return np.full(len(at), NAN)
        order = np.argsort(values[known])
        heights = np.cumsum(weights[known][order])
        places = np.searchsorted(heights, np.asarray(at) * heights[-1])
        return np.asarray(values[known][order][np.minimum(places, len(order) - 1)])


@dataclass(frozen=True)
class Phase:
    """Steps under one plan: from and to a step, or in asynchronous mode a time."""

    plan: Event
    axis: str
    first: float
    end: float

    @property
    def batches(self) -> list[int]:
        return list(self.plan["batches"])

    @property
    def name(self) -> str:
        return f"plan of step {self.first:,.0f}" if self.axis == "step" else f"plan {self.plan.get('reason', '')!r}"


@dataclass
class Run:
    """``problems`` says what could not be read, and what is missing."""

    name: str
    mode: str = "sync"
    backend: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    version: str = ""
    workers: list[Worker] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    plans: list[Event] = field(default_factory=list)
    curves: tuple[list[float | None], list[float | None]] = ((), ())  # type: ignore[assignment]
    equal_time: float | None = None  # of a step with equal batches, by the curves; None: they are not sure of it
    metrics: list[Event] = field(default_factory=list)
    marks: list[Event] = field(default_factory=list)  # out of memory, faults, checkpoints
    errors: list[str] = field(default_factory=list)
    rows: dict[int, Rows] = field(default_factory=dict)
    updates: dict[int, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def is_async(self) -> bool:
        return self.mode == "async"

    @property
    def seconds(self) -> float:
        return max(self.ended - self.began, 0.0)

    @cached_property
    def steps(self) -> int:
        ends = [float((rows["step"] + rows["steps"]).max()) for rows in self.rows.values() if len(rows)]
        return int(max(ends, default=0))

    @property
    def global_batch(self) -> int:
        given = self.options.get("global_batch")
        return int(given) if given else sum(self.plans[-1]["batches"]) if self.plans else 0

    @cached_property
    def phases(self) -> list[Phase]:
        """One per plan whose batches differ from those before, in the order of steps (or times)."""
        name = "t" if self.is_async else "step"
        changed: list[Event] = []
        for plan in self.plans:
            if changed and (plan.get(name) or 0) <= (changed[-1].get(name) or 0):
                changed.pop()  # replaced before it took effect
            if not changed or plan["batches"] != changed[-1]["batches"]:
                changed.append(plan)
        firsts = [float(plan.get(name) or 0) for plan in changed]
        ends = [*firsts, float("inf")][1:]
        return [Phase(plan, name, first, end) for plan, first, end in zip(changed, firsts, ends, strict=True)]

    @cached_property
    def paces(self) -> list[float | None]:
        """Seconds per step in each phase."""
        return [self.step_time(phase) for phase in self.phases]

    def length(self, phase: Phase) -> float:
        """Steps under a plan."""
        return max(min(phase.end, self.steps) - phase.first, 0.0)

    def measured_in(self, phase: Phase) -> int:
        counts = [float(rows.between(phase).measured["measured"].sum()) for rows in self.rows.values()]
        return int(max(counts, default=0))

    @cached_property
    def before_and_after(self) -> tuple[Phase, Phase] | None:
        """The first plan that was measured, and the last for more than a try. None where there was only one."""
        known = [(phase, self.measured_in(phase)) for phase in self.phases]
        known = [(phase, steps) for phase, steps in known if steps]
        if len(known) < 2:
            return None
        after = next((phase for phase, steps in reversed(known[1:]) if steps >= STEADY), known[-1][0])
        return known[0][0], after

    def step_time(self, phase: Phase | None = None) -> float | None:
        """Mean seconds per step, of the workers that took part. None: not measured."""
        if phase is None and self.phases and not self.is_async:
            known = [(pace, self.length(phase)) for phase, pace in zip(self.phases, self.paces, strict=True) if pace]
            steps = sum(length for _, length in known)
            return sum(pace * length for pace, length in known) / steps if steps else None
        seconds = steps = 0.0
        for rows in self.rows.values():
            part = (rows if phase is None else rows.between(phase)).measured
            seconds += float(np.nansum(part["measured"] * (part["busy"] + part["wait"])))
            steps += float(part["measured"].sum())
        return seconds / steps if steps else None

    def rate(self, phase: Phase | None = None) -> float | None:
        """Samples per second while training, all workers together."""
        if self.is_async:
            total = 0.0
            for rows in self.rows.values():
                part = (rows if phase is None else rows.between(phase)).measured
                seconds = float(np.nansum(part["measured"] * (part["busy"] + part["wait"])))
                total += float((part["measured"] * part["batch"]).sum()) / seconds if seconds else 0.0
            return total or None
        time = self.step_time(phase)
        return self.global_batch / time if time and self.global_batch else None

    def under(self, worker: int, phase: Phase) -> Rows:
        """A worker's steps with just the batch of a plan: not the tail of an epoch, nor what was under way."""
        rows = self.rows[worker].between(phase)
        return rows.where(rows["batch"] == (phase.batches[worker] if worker < len(phase.batches) else 0))

    def spent(self, worker: int) -> dict[str, float]:
        """Seconds in which a worker computed, waited for samples, waited for the others, was parked."""
        rows = self.rows[worker]
        busy, data = rows.total("busy"), rows.total("data")
        parked = 0.0
        for phase, pace in zip(self.phases, self.paces, strict=True) if not self.is_async else ():
            if worker < len(phase.batches) and not phase.batches[worker]:
                parked += (pace or 0.0) * self.length(phase)
        return {"compute": max(busy - data, 0.0), "data": data, "wait": rows.total("wait"), "parked": parked}

    def line(self, worker: int) -> tuple[float, float] | None:
        """α and β of a worker as the controller fitted them."""
        alpha, beta = self.curves
        if worker >= min(len(alpha), len(beta)) or alpha[worker] is None or beta[worker] is None:
            return None
        return float(alpha[worker] or 0.0), float(beta[worker] or 0.0)
