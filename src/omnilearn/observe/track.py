"""From events to trackers: TensorBoard, Weights & Biases, MLflow, or whatever has ``log`` and ``close``.

A tracker is fed from the log folder, by a thread while a run is under way or all at once afterwards. So it costs the
training nothing, and is the same for all frameworks. Standard library only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

from omnilearn.observe.board import Board
from omnilearn.observe.events import Event, Follower, collect
from omnilearn.observe.windows import flat

log = logging.getLogger("omnilearn")

EVERY = 2.0
"""Seconds between two looks at the files."""


class Tracker(Protocol):
    """Where figures go. ``values`` are named like "batch/worker 0"; ``t`` is in seconds since 1970."""

    def log(self, values: Mapping[str, float], step: int, t: float) -> None: ...

    def close(self) -> None: ...


class Scalars:
    """What there is to track in events, one after the other."""

    def __init__(self) -> None:
        self._board = Board()

    def of(self, event: Event) -> Iterator[tuple[dict[str, float], int, float]]:
        self._board.feed([event])
        try:
            values, step = self._values(event)
        except (KeyError, TypeError, ValueError, IndexError):
            return  # an event with fields missing
        if values:
            yield values, step, float(event["t"])

    def _values(self, event: Event) -> tuple[dict[str, float], int]:
        kind, board = event["kind"], self._board
        if kind == "metric":
            skipped = ("v", "kind", "t", "rank", "step")
            return _numbers({k: v for k, v in event.items() if k not in skipped}, "metric/"), board.step
        if kind == "plan":
            values = {f"batch/worker {k}": float(batch) for k, batch in enumerate(event["batches"])}
            return values, int(event.get("step") or 0)
        if kind not in ("steps", "window"):
            return {}, 0
        rows = list(flat(event))
        worker, last = rows[-1]["worker"], rows[-1]
        step = int(last["step"]) + int(last["steps"]) - 1
        measured = [row for row in rows if row["measured"]]
        values = {}
        for name, unit in (("busy", 1e3), ("wait", 1e3), ("data", 1e3), ("staleness", 1.0), ("loss", 1.0)):
            known = [row[name] for row in measured if row.get(name) is not None]
            if known:
                label = f"{name}_ms" if unit == 1e3 else name
                values[f"{label}/worker {worker}"] = unit * sum(known) / len(known)
        if measured and worker == min((w.rank for w in board.workers if not w.parked), default=worker):
            values |= _numbers({"samples_per_second": board.rate, "predicted_gain": board.gain, "loss": board.loss}, "")
        return values, step


def _numbers(values: Mapping[str, object], prefix: str) -> dict[str, float]:
    return {prefix + name: float(v) for name, v in values.items() if isinstance(v, (int, float)) and v}


def replay(folder: str | os.PathLike[str], tracker: Tracker) -> None:
    """Send all that is in a log folder to ``tracker``, and close it."""
    scalars = Scalars()
    events, problems = collect(folder)
    for problem in problems:
        log.warning(problem)
    try:
        for event in events:
            for values in scalars.of(event):
                tracker.log(*values)
    finally:
        tracker.close()


@contextlib.contextmanager
def track(folder: str | os.PathLike[str], tracker: Tracker) -> Iterator[None]:
    """While the block runs, send what appears in a log folder to ``tracker``; close it at the end.

    A tracker that fails is left alone from then on, with one warning: training goes on.
    """
    follower, scalars, over = Follower(folder), Scalars(), threading.Event()

    def send(events: list[Event]) -> None:
        for event in events:
            for values in scalars.of(event):
                tracker.log(*values)

    def run() -> None:
        try:
            while not over.wait(EVERY):
                send(follower.poll())
            send(follower.poll())
            tracker.close()
        except Exception as error:
            log.warning("%s tracks no more: %s: %s", type(tracker).__name__, type(error).__name__, error)

    thread = threading.Thread(target=run, name="omnilearn-track", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)
