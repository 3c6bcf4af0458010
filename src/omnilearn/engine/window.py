"""The steps under way: how many there may be, how far apart, and a moment in which there are none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from omnilearn.errors import PeerFailure


class Window:
    """Steps are numbered as they begin. None begins that is more than ``width`` after the oldest one under way.

    While a step is under way, at most ``width`` later ones can end, and at most ``width`` earlier ones: no gradient is
    more than ``2·width`` updates old. None: no bound.
    """

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._changed = threading.Condition()
        self._under_way: set[int] = set()
        self._next = 0
        self._closed = self._resting = False

    def begin(self) -> int | None:
        """Wait until a step may begin; its number. None: the window was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_begin())
            if self._closed:
                return None
            number, self._next = self._next, self._next + 1
            self._under_way.add(number)
            return number

    def _may_begin(self) -> bool:
        near = self._width is None or self._next - min(self._under_way, default=self._next) <= self._width
        return near and not self._resting

    def end(self, number: int) -> None:
        with self._changed:
            self._under_way.remove(number)
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing begins any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def rest(self, timeout: float) -> Iterator[None]:
        """In here no step is under way."""
        with self._changed:
            self._resting = True
            try:
                if not self._changed.wait_for(lambda: not self._under_way, timeout):
                    raise PeerFailure(f"steps begun by the workers did not end within {timeout:g} s")
                yield
            finally:
                self._resting = False
                self._changed.notify_all()
