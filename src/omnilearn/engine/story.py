"""What a rank tells the events of its steps, plans and curves."""

from __future__ import annotations

import time
from typing import Any

from omnilearn.control import State
from omnilearn.engine.peers import Peers
from omnilearn.observe import EventLog

CURVES_EVERY = 30.0
"""Seconds between two entries of the fitted curves where no plan is made."""
MEMORY_EVERY = 1.0
"""Seconds between two looks at the memory in use."""


class Story:
    """Writes for one rank. Without a log folder every method returns at once."""

    def __init__(self, events: EventLog, world: Peers) -> None:
        self._events, self._world = events, world
        self._curves_at = self._memory_at = 0.0
        self._memory = 0

    def steps(self, step: int, **lists: list[Any]) -> None:
        if self._events:
            self._events.write("steps", step=step, **lists, memory=self._peak())

    def plan(self, state: State, step: int) -> None:
        if self._world.is_main and self._events:
            plan = state.plan
            self._events.write(
                "plan",
                step=step,
                batches=plan.batches,
                parked=plan.parked,
                reason=plan.reason,
                predicted=plan.predicted,
                instead_of=plan.instead_of,
            )
            self.curves(state, step, now=True)

    def curves(self, state: State, step: int, now: bool = False) -> None:
        """The lines t(b) = α + β·b that the policy fitted, where it does; null for a worker never measured."""
        fitted = getattr(state, "curves", None)
        if fitted is None or not self._world.is_main or not self._events:
            return
        if not now and time.monotonic() - self._curves_at < CURVES_EVERY:
            return
        self._curves_at = time.monotonic()
        if any(fitted.seen):
            known = [bool(seen) for seen in fitted.seen]
            equal = fitted.equal_shares(sum(state.plan.batches))
            self._events.write(
                "curves",
                step=step,
                alpha=_known(fitted.alpha, known),
                beta=_known(fitted.beta, known),
                equal=None if equal is None else float(f"{equal:.5g}"),
            )

    def _peak(self) -> int:
        """The most memory in use so far, in bytes: of the card, or of the process."""
        if time.monotonic() - self._memory_at >= MEMORY_EVERY:
            self._memory_at = time.monotonic()
            self._memory = self._world.peak_memory()
        return self._memory


def _known(values: Any, known: list[bool]) -> list[float | None]:
    return [float(f"{value:.5g}") if seen else None for value, seen in zip(values, known, strict=True)]
