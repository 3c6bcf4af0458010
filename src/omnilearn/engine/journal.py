"""What an asynchronous server tells the events: who takes part, the plans, the epochs, what became of each gradient."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from omnilearn import __version__
from omnilearn.control import Plan
from omnilearn.observe import EventLog

EVERY = 0.5
"""Seconds between two entries of updates."""
MOST = 50_000
"""Gradients that are noted one by one; what workers write goes on, and stays small."""


class Journal:
    """``options``: those of the run, with its mode."""

    def __init__(self, events: EventLog, backend: str, options: dict[str, Any]) -> None:
        self._events, self._backend, self._options = events, backend, options
        self._began = False
        self._plan: Plan | None = None
        self._updates: list[tuple[int, int, float, int]] = []
        self._noted = 0
        self._written = time.monotonic()

    def epoch(self, workers: Sequence[dict[str, Any]], epoch: int, step: int, steps: int, plan: Plan) -> None:
        """An epoch begins; with the first one the run does, as the workers (what each has) are known then."""
        if not self._began:
            self._began = True
            options = {name: value for name, value in self._options.items() if name != "mode"}
            mode = self._options["mode"]
            self._events.write("run", mode=mode, backend=self._backend, options=options, workers=list(workers),
                               omnilearn=__version__)  # fmt: skip
        self.plan(plan, step)
        self._events.write("epoch", epoch=epoch, step=step, steps=steps)

    def plan(self, plan: Plan, step: int) -> None:
        if plan != self._plan:
            self._plan = plan
            self._events.write(
                "plan", step=step, batches=plan.batches, parked=[], reason=plan.reason, predicted=plan.predicted,
                instead_of=plan.instead_of,
            )  # fmt: skip

    def update(self, rank: int, staleness: int, weight: float, samples: int) -> None:
        self._noted += 1
        if self._noted <= MOST:
            self._updates.append((rank, staleness, weight, samples))

    def write_updates(self, version: int, step: int, *, now: bool) -> None:
        """What was noted, if it is time, or ``now``."""
        if not self._updates or not (now or time.monotonic() - self._written > EVERY):
            return
        workers, staleness, weights, samples = zip(*self._updates, strict=True)
        self._updates, self._written = [], time.monotonic()
        self._events.write(
            "updates", version=version, step=step, worker=workers, staleness=staleness,
            weight=[round(weight, 4) for weight in weights], batch=samples,
        )  # fmt: skip
