"""A worker's own steps in the events."""

from __future__ import annotations

import time

from omnilearn.observe import EventLog

EVERY = 0.5
"""Seconds between two entries."""


class StepLog:
    """Keeps steps until it is time to write them. ``updates`` counts the gradients that the server applied."""

    def __init__(self, events: EventLog) -> None:
        self._events, self.updates = events, 0
        self._rows: list[tuple[int, float, float, int, float]] = []
        self._written, self._first = time.monotonic(), 0

    def add(self, samples: int, busy: float, wait: float, staleness: int, loss: float) -> None:
        self._rows.append((samples, round(busy, 6), round(wait, 6), staleness, round(loss, 6)))

    def write(self, *, now: bool) -> None:
        """What was kept, if it is time, or ``now``."""
        if not self._rows or not (now or time.monotonic() - self._written > EVERY):
            return
        batch, busy, wait, staleness, loss = map(list, zip(*self._rows, strict=True))
        self._events.write(
            "steps", step=self._first, batch=batch, busy=busy, wait=wait, staleness=staleness, loss=loss,
            updates=self.updates,
        )  # fmt: skip
        self._first += len(self._rows)
        self._rows, self._written = [], time.monotonic()
