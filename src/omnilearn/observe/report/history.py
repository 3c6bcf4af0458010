"""A whole run as arrays: what a report asks of it. Reads the events of a log folder once; draws and says nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnilearn.errors import UsageError
from omnilearn.observe.board import Worker
from omnilearn.observe.events import Event, collect

Floats = npt.NDArray[np.float64]

NAN = float("nan")
COLUMNS = (
    "t", "step", "steps", "measured", "batch",
    "busy_min", "busy_lower", "busy_median", "busy_upper", "busy_max", "busy",
    "wait_median", "wait", "data", "loss_min", "loss", "loss_max", "staleness_max", "staleness", "memory",
)  # fmt: skip
AT = {name: i for i, name in enumerate(COLUMNS)}
MOST_WORKERS = 100_000
STEADY = 3
"""A plan whose steps are shown as "before" has at least so many measured ones, if there is any such plan."""


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


@dataclass
class Run:
    """``Run.load(folder)``. ``problems`` says what could not be read, and what is missing."""

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
    metrics: list[Event] = field(default_factory=list)
    marks: list[Event] = field(default_factory=list)  # out of memory, faults, checkpoints
    errors: list[str] = field(default_factory=list)
    rows: dict[int, Rows] = field(default_factory=dict)
    updates: dict[int, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @staticmethod
    def load(folder: str | os.PathLike[str], name: str | None = None) -> Run:
        events, problems = collect(folder)
        run = Run(name or _name(Path(folder)), problems=problems)
        _fill(run, events)
        return run

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
        """The first plan that was measured, and the last. None where there was only one."""
        known = [(phase, self.measured_in(phase)) for phase in self.phases]
        known = [(phase, steps) for phase, steps in known if steps]
        if len(known) < 2:
            return None
        before = next((phase for phase, steps in known[:-1] if steps >= STEADY), known[0][0])
        after = next((phase for phase, steps in reversed(known[1:]) if steps >= STEADY), known[-1][0])
        return (before, after) if before is not after else None

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


def _name(folder: Path) -> str:
    full = folder.resolve()
    return full.name if full.parent.name in ("runs", "") else f"{full.parent.name}/{full.name}"


def _fill(run: Run, events: list[Event]) -> None:
    starts = [i for i, event in enumerate(events) if event["kind"] == "run"]
    if len(starts) > 1:
        run.problems.append(f"{run.name} was started {len(starts)} times in the same folder: shown is the last time")
        begin = events[starts[-1]]["t"]
        events = [event for event in events if event["t"] >= begin]
    if not starts:
        run.problems.append(f"{run.name} has no description of the run: rank 0's events are missing or cut off")
    tables: dict[int, list[tuple[float, ...]]] = {}
    odd = sum(not _understood(run, event, tables) for event in events)
    count = max([len(run.workers), *(len(p["batches"]) for p in run.plans), *(k + 1 for k in tables)], default=0)
    run.workers += [Worker(rank) for rank in range(len(run.workers), count)]
    run.rows = {k: Rows(_possible(tables.get(k, ()))) for k in range(count)}
    odd += sum(len(tables.get(k, ())) - len(rows) for k, rows in run.rows.items())
    if odd:
        run.problems.append(f"{odd} events of {run.name} are damaged: left out")
    if not any(len(rows) for rows in run.rows.values()):
        run.problems.append(f"{run.name} has no steps: it ended, or was looked at, before the first")
    elif not any(event["kind"] == "end" for event in events):
        run.problems.append(f"{run.name} has no end: it is still running, or was killed")


def _possible(rows: Sequence[tuple[float, ...]]) -> Floats:
    """Rows as a table, without those that no clock and no plan can have given."""
    table = np.array(rows, dtype=np.float64).reshape(-1, len(COLUMNS))
    known = np.nan_to_num(table[:, : AT["loss_min"]])
    return np.asarray(table[((known >= 0) & (known < 1e15)).all(axis=1)])


def _understood(run: Run, event: Event, tables: dict[int, list[tuple[float, ...]]]) -> bool:
    try:
        t = _number(event["t"], 1.0, 1e11)
        if event["kind"] in ("steps", "window"):
            _take(event, tables, run)
        elif event["kind"] in TAKEN:
            TAKEN[event["kind"]](run, event)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
        return False
    run.began, run.ended = min(run.began or t, t), max(run.ended, t)
    return True


def _number(value: Any, low: float = 0.0, high: float = 1e15) -> float:
    """A number that can be one: files may have been damaged, or written by others."""
    if isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{value!r} is not between {low:g} and {high:g}")
    return float(value)


def _run(run: Run, event: Event) -> None:
    run.mode, run.version = str(event.get("mode", "sync")), str(event.get("omnilearn", ""))
    run.backend, run.options = str(event.get("backend", "")), dict(event["options"])
    if run.options.get("global_batch") is not None:
        _number(run.options["global_batch"])
    for rank, found in enumerate(event["workers"]):
        cores = None if found.get("cores") is None else _number(found["cores"])
        run.workers.append(Worker(rank, cores, str(found.get("device", "cpu")), str(found.get("device_name", ""))))
        run.hosts.append(str(found.get("host", "")))


def _plan(run: Run, event: Event) -> None:
    if event.get("step") is not None:
        _number(event["step"])
    batches = [int(_number(batch)) for batch in event["batches"]]
    parked = [k for k, batch in enumerate(batches) if not batch]
    times = {name: None if event.get(name) is None else _number(event[name]) for name in ("predicted", "instead_of")}
    run.plans.append({**event, **times, "batches": batches, "parked": parked})


def _curves(run: Run, event: Event) -> None:
    alpha, beta = ([None if v is None else _number(v) for v in event[name]] for name in ("alpha", "beta"))
    run.curves = alpha, beta


def _metric(run: Run, event: Event) -> None:
    if "seconds" in event:
        _number(event["seconds"])
    run.metrics.append(event)


def _end(run: Run, event: Event) -> None:
    if not event["ok"]:
        run.errors.append(f"rank {event['rank']}: {event.get('error') or 'failed'}")


TAKEN = {
    "run": _run,
    "plan": _plan,
    "curves": _curves,
    "metric": _metric,
    "oom": lambda run, event: run.marks.append(event),
    "fault": lambda run, event: run.marks.append(event),
    "checkpoint": lambda run, event: run.marks.append(event),
    "end": _end,
}


def _take(event: Event, tables: dict[int, list[tuple[float, ...]]], run: Run) -> None:
    worker = int(_number(event["worker"] if "worker" in event else event["rank"], 0, MOST_WORKERS))
    memory = event.get("memory") or NAN
    if event["kind"] == "window":
        busy, wait = event.get("busy") or (NAN,) * 6, event.get("wait") or (NAN,) * 6
        data, loss = event.get("data") or (0.0,) * 6, event.get("loss") or (NAN,) * 6
        late = event.get("staleness") or (NAN,) * 6
        rows: list[tuple[Any, ...]] = [(
            event["t"], event["step"], _number(event["steps"], 1), event["measured"], event["batch"][2], *busy,
            wait[2], wait[5], data[5], loss[0], loss[5], loss[4], late[4], late[5], memory,
        )]  # fmt: skip
    else:
        rows = _singles(event, memory)
    numbers = [tuple(map(float, row)) for row in rows]
    if len(numbers[0]) != len(COLUMNS):
        raise ValueError("a summary has six numbers")
    tables.setdefault(worker, []).extend(numbers)
    if event.get("updates") is not None:
        run.updates[worker] = int(_number(event["updates"]))


def _singles(event: Event, memory: float) -> list[tuple[Any, ...]]:
    """A row for each step, with the time of its end."""
    n = len(event["batch"])
    empty: tuple[Any, ...] = (None,) * n
    batch, busy, wait = event["batch"], event["busy"], event["wait"]
    data, loss = event.get("data") or (0.0,) * n, event.get("loss") or empty
    late = event.get("staleness") or empty
    if not len(busy) == len(wait) == len(data) == len(loss) == len(late) == n:
        raise ValueError("lists of different lengths")
    t, rows = event["t"], []
    for i in range(n - 1, -1, -1):
        b, w, known = busy[i] or NAN, wait[i] if busy[i] else NAN, 1.0 if busy[i] else 0.0
        v, s = NAN if loss[i] is None else loss[i], NAN if late[i] is None else late[i]
        step = event["step"] + i
        rows.append((t, step, 1.0, known, batch[i], b, b, b, b, b, b, w, w, data[i] or 0.0, v, v, v, s, s, memory))
        t -= (busy[i] or 0.0) + (wait[i] or 0.0)
    return rows[::-1]


def _loaded(folder: str | os.PathLike[str]) -> Run | str:
    try:
        return Run.load(folder)
    except (UsageError, OSError) as error:
        return str(error)


def runs(folders: Sequence[str | os.PathLike[str]]) -> tuple[list[Run], list[str]]:
    """All runs that can be read, and what is wrong with the others. An error where none can be."""
    tried = [_loaded(folder) for folder in folders]
    loaded, problems = [run for run in tried if isinstance(run, Run)], [text for text in tried if isinstance(text, str)]
    if not loaded:
        raise UsageError("; ".join(problems))
    with contextlib.suppress(ValueError):
        common = os.path.commonpath([run.name for run in loaded]) if len(loaded) > 1 else ""
        if common and len({run.name for run in loaded}) == len(loaded):
            for run in loaded:
                run.name = run.name[len(common) + 1 :] or run.name
    return loaded, problems
