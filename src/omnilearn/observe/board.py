"""What the events say about now: who has which batch, who computes, who waits, how far training is.

Fed with events in the order they come; knows nothing of files and terminals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omnilearn.observe.events import Event
from omnilearn.observe.windows import flat

WINDOW = 2.0  # seconds of steps that a worker's rates are taken over

Row = tuple[float, float, float]
"""Of one or several measured steps: samples, busy and waiting seconds."""


@dataclass
class Worker:
    """One worker as last heard of. ``rows`` are its last measured steps."""

    rank: int
    cores: float | None = None
    device: str = "cpu"
    device_name: str = ""
    batch: int = 0
    parked: bool = False
    rows: deque[Row] = field(default_factory=deque)
    total: Row = (0, 0.0, 0.0)
    loss: float | None = None
    staleness: float | None = None

    @property
    def place(self) -> str:
        """What it computes with, short."""
        if self.device != "cpu":
            return self.device_name or self.device
        return "cpu" if self.cores is None else f"{self.cores:.3g} core{'s' if self.cores != 1 else ''}"

    @property
    def computing(self) -> float | None:
        """The share of its time in which it computed lately; the rest it waited. None: not known."""
        return _share(self.rows)

    @property
    def computed(self) -> float | None:
        """The same over all of the run."""
        return _share([self.total])

    @property
    def rate(self) -> float:
        """Samples per second, lately."""
        seconds = sum(busy + wait for _, busy, wait in self.rows)
        return sum(batch for batch, _, _ in self.rows) / seconds if seconds else 0.0

    def steps(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            n, busy = row["measured"], row.get("busy")
            if n and row["batch"] and busy:
                mine = (n * row["batch"], n * busy, n * (row.get("wait") or 0.0))
                self.rows.append(mine)
                self.total = (self.total[0] + mine[0], self.total[1] + mine[1], self.total[2] + mine[2])
                self.loss = self.loss if row.get("loss") is None else row["loss"]
                self.staleness = self.staleness if row.get("staleness") is None else row["staleness"]
        while len(self.rows) > 2 and sum(busy + wait for _, busy, wait in self.rows) > WINDOW:
            self.rows.popleft()


class Board:
    """The state of a run: ``feed`` it with events."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.mode = "sync"
        self.options: dict[str, Any] = {}
        self.equal_time: float | None = None
        self.plan: Event | None = None
        self.plans = 0
        self.epoch = 0
        self.epoch_step, self.epoch_steps = 0, 0
        self.step = 0
        self.metric: Event | None = None
        self.ended = False
        self.error = ""
        self.started: float | None = None
        self.last = 0.0

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            handler = HANDLERS.get(event["kind"])
            if handler is not None:  # other kinds came later than this reader
                self.last = max(self.last, event["t"])
                try:
                    handler(self, event)
                except (KeyError, TypeError, ValueError, IndexError):
                    continue  # an event with fields missing must not end the view of the others

    @property
    def rate(self) -> float:
        """Samples per second, all workers together."""
        return sum(worker.rate for worker in self.workers if not worker.parked)

    @property
    def parked(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.parked]

    @property
    def loss(self) -> float | None:
        """The workers' last losses, weighted by their batches."""
        known = [(w.loss, w.batch) for w in self.workers if w.loss is not None and w.batch]
        return sum(loss * batch for loss, batch in known) / sum(batch for _, batch in known) if known else None

    @property
    def step_time(self) -> float | None:
        """Seconds per step, lately: of the workers that take part, the one that knows most steps."""
        active = [worker for worker in self.workers if worker.rows and worker.batch and not worker.parked]
        if not active:
            return None
        worker = max(active, key=lambda worker: worker.total[0] / worker.batch)
        seconds, samples = sum(busy + wait for _, busy, wait in worker.rows), sum(row[0] for row in worker.rows)
        return seconds * worker.batch / samples

    @property
    def gain(self) -> float | None:
        """How many times as fast as with equal batches, by the fitted curves. None: not known."""
        now = self.step_time
        if self.mode != "sync" or not now:
            return None
        return self.equal_time / now if self.equal_time else None

    @property
    def epoch_left(self) -> float | None:
        """Seconds to the end of the epoch, at the pace of late. None: not known."""
        left, now = self.epoch_step + self.epoch_steps - self.step, self.step_time
        return left * now if self.epoch_steps and now and not self.ended and left > 0 else None

    def _run(self, event: Event) -> None:
        self.__init__()  # type: ignore[misc]  # a restart in the same folder begins anew
        self.started = self.last = event["t"]
        self.options, self.mode = dict(event["options"]), event.get("mode", "sync")
        for rank, found in enumerate(event["workers"]):
            self.workers.append(Worker(rank, found["cores"], found["device"], found.get("device_name", "")))

    def _plan(self, event: Event) -> None:
        batches: Sequence[int] = event["batches"]
        self._at_least(len(batches))
        self.plan, self.plans = event, self.plans + 1
        for worker, batch in zip(self.workers, batches, strict=False):
            if batch != worker.batch:
                worker.rows.clear()  # rates of another batch say nothing about this one
            worker.batch, worker.parked = batch, batch == 0

    def _epoch(self, event: Event) -> None:
        self.epoch, self.epoch_step, self.epoch_steps = event["epoch"], event["step"], event["steps"] or 0
        self.step = max(self.step, self.epoch_step)

    def _steps(self, event: Event) -> None:
        rows = list(flat(event))
        worker = int(rows[-1]["worker"])
        self._at_least(worker + 1)
        self.step = max(self.step, rows[-1]["step"] + rows[-1]["steps"])
        self.workers[worker].steps(rows)

    def _curves(self, event: Event) -> None:
        self.equal_time = event.get("equal")

    def _metric(self, event: Event) -> None:
        self.metric = event

    def _end(self, event: Event) -> None:
        self.ended = self.ended or event["rank"] == 0
        if not event["ok"] and not self.error:
            self.error = f"rank {event['rank']}: {event.get('error', 'failed')}"

    def _at_least(self, workers: int) -> None:
        self.workers += [Worker(rank) for rank in range(len(self.workers), workers)]


HANDLERS = {
    "run": Board._run,
    "plan": Board._plan,
    "epoch": Board._epoch,
    "steps": Board._steps,
    "window": Board._steps,
    "curves": Board._curves,
    "metric": Board._metric,
    "end": Board._end,
}


def _share(rows: Iterable[Row]) -> float | None:
    busy = waiting = 0.0
    for _, b, w in rows:
        busy, waiting = busy + b, waiting + w
    return busy / (busy + waiting) if busy + waiting else None
