"""From the events of a log folder to a ``Run``. Damaged and foreign events are left out, counted and told."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omnilearn.errors import UsageError
from omnilearn.observe.board import Worker
from omnilearn.observe.events import Event, collect
from omnilearn.observe.report.history import AT, COLUMNS, NAN, Floats, Rows, Run

MOST_WORKERS = 100_000


def load(folder: str | os.PathLike[str]) -> Run:
    """One run."""
    events, problems = collect(folder)
    run = Run(_name(Path(folder)), problems=problems)
    _fill(run, events)
    return run


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
    run.equal_time = None if event.get("equal") is None else _number(event["equal"])


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
    "memory": lambda run, event: run.marks.append(event),
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
        return load(folder)
    except (UsageError, OSError) as error:
        return str(error)


def load_all(folders: Sequence[str | os.PathLike[str]]) -> tuple[list[Run], list[str]]:
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
