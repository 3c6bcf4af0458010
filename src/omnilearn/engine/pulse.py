"""Is a parked worker still as fast as it was? Looked at now and then, while it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median

EVERY, AGAIN = 1.5, 0.5
"""Seconds of a loop between two looks at a parked worker's own speed, and after a suspicious one. Each takes about a
tenth of a second, and is off by an eighth where a quota holds the worker up."""
LONGEST_LOOK = 10.0
CHANGE = 1.3
"""A parked worker's speed counts as changed beyond this factor, seen twice in a row."""
FIRST, LOOKS = 3, 5
"""The first time it is looked so often; what its speed is, so many times say together."""


class Pulse:
    """A parked worker's own speed, looked at now and then, relative to when it was first looked at.

    In a thread of its own: on a slow worker a look takes long, and the others must not wait for this one meanwhile.
    """

    def __init__(self, speed: Callable[[], float]) -> None:
        self._speed = speed
        self._thread: threading.Thread | None = None
        self._found: list[float] = []
        self.forget()

    def forget(self) -> float:
        self.end()
        self._found.clear()
        self._usual, self._looks = 1.0, 0
        # Not at once: who was just parked is on trial, and a look would show in the measured times.
        self.ratio, self._suspect, self._last, self._waited = 1.0, 1.0, time.monotonic(), 0.0
        return self.ratio

    def pause(self) -> None:
        """Time does not count from now on."""
        self._waited = time.monotonic() - self._last

    def resume(self) -> None:
        self._last = time.monotonic() - self._waited

    def look(self) -> None:
        if self._found:
            self._compare(self._found.pop())
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        pause = EVERY if self._suspect == 1 else AGAIN
        if self._thread is None and time.monotonic() - self._last >= pause:
            self._last = time.monotonic()
            self._thread = threading.Thread(target=self._measure, name="omnilearn-pulse", daemon=True)
            self._thread.start()

    def _measure(self) -> None:
        self._found.append(median([self._speed() for _ in range(1 if self._looks else FIRST)]))

    def _compare(self, speed: float) -> None:
        if not self._looks:
            self._usual = speed
        off = speed / (self._usual * self.ratio)
        if 1 / CHANGE < off < CHANGE:
            self._suspect, self._looks = 1.0, self._looks + 1
            if self._looks <= LOOKS:
                self._usual *= off ** (1 / self._looks)
        elif (off > 1) == (self._suspect > 1) and self._suspect != 1:
            self.ratio *= (off * self._suspect) ** 0.5
            self._suspect = 1.0
        else:
            self._suspect = off

    def end(self) -> None:
        """Wait for a look under way."""
        if self._thread is not None:
            self._thread.join(LONGEST_LOOK)
            self._thread = None
