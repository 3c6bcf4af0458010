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


class Beat:
    """What the looks at a parked worker say together: its speed now, relative to the first ones."""

    def __init__(self) -> None:
        self._usual, self._looks = 1.0, 0
        self.ratio, self._suspect = 1.0, 1.0

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return EVERY if self._suspect == 1 else AGAIN

    @property
    def repeats(self) -> int:
        """How often to look then."""
        return 1 if self._looks else FIRST

    def compare(self, speed: float) -> None:
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


class Pulse:
    """Looks at a parked worker's own speed now and then.

    In a thread of its own: on a slow worker a look takes long, and the others must not wait for this one meanwhile.
    """

    def __init__(self, speed: Callable[[], float]) -> None:
        self._speed = speed
        self._thread: threading.Thread | None = None
        self._found: list[float] = []
        self.forget()

    @property
    def ratio(self) -> float:
        return self._beat.ratio

    def forget(self) -> float:
        self.end()
        self._found.clear()
        # Not at once: who was just parked is on trial, and a look would show in the measured times.
        self._beat, self._last, self._waited = Beat(), time.monotonic(), 0.0
        return self.ratio

    def pause(self) -> None:
        """Time does not count from now on."""
        self._waited = time.monotonic() - self._last

    def resume(self) -> None:
        self._last = time.monotonic() - self._waited

    def look(self) -> None:
        if self._found:
            self._beat.compare(self._found.pop())
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._thread is None and time.monotonic() - self._last >= self._beat.pause:
            self._last = time.monotonic()
            self._thread = threading.Thread(target=self._measure, name="omnilearn-pulse", daemon=True)
            self._thread.start()

    def _measure(self) -> None:
        self._found.append(median([self._speed() for _ in range(self._beat.repeats)]))

    def end(self) -> None:
        """Wait for a look under way."""
        if self._thread is not None:
            self._thread.join(LONGEST_LOOK)
            self._thread = None
