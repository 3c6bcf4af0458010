"""What the events say about now: who has which batch, who computes, who waits, how far training is.

Fed with events in the order they come; knows nothing of files and terminals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omnilearn.observe.events import Event

WINDOW = 2.0  # seconds of steps that a worker's rates are taken over


@dataclass
class Worker:
    """One worker as last heard of. ``rows`` are its last measured steps: batch, busy and waiting seconds."""

    rank: int
    cores: float | None = None
    device: str = "cpu"
    device_name: str = ""
    batch: int = 0
    parked: bool = False
    rows: deque[tuple[int, float, float]] = field(default_factory=deque)
    total: tuple[int, float, float] = (0, 0.0, 0.0)

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

    def steps(self, rows: Iterable[tuple[int, float, float]]) -> None:
        measured = [row for row in rows if row[0] and row[1] > 0]
        self.rows.extend(measured)
        for row in measured:
            self.total = (self.total[0] + row[0], self.total[1] + row[1], self.total[2] + row[2])
        while len(self.rows) > 2 and sum(busy + wait for _, busy, wait in self.rows) > WINDOW:
            self.rows.popleft()


class Board:
    """The state of a run: ``feed`` it with events."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.options: dict[str, Any] = {}
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

    def _run(self, event: Event) -> None:
        self.__init__()  # type: ignore[misc]  # a restart in the same folder begins anew
        self.started = self.last = event["t"]
        self.options = dict(event["options"])
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
        self._at_least(event["rank"] + 1)
        self.step = max(self.step, event["step"] + len(event["batch"]))
        rows = zip(event["batch"], event["busy"], event["wait"], strict=True)
        self.workers[event["rank"]].steps(rows)

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
    "metric": Board._metric,
    "end": Board._end,
}


def _share(rows: Iterable[tuple[int, float, float]]) -> float | None:
    busy = waiting = 0.0
    for _, b, w in rows:
        busy, waiting = busy + b, waiting + w
    return busy / (busy + waiting) if busy + waiting else None
