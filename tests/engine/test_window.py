"""The steps under way in asynchronous mode: how old a gradient can get."""

from __future__ import annotations

import threading

import pytest

from omnilearn.engine.window import Window
from omnilearn.errors import PeerFailure

LIMIT = 20.0


def ages(width: int | None, fast_steps: int) -> tuple[int, int]:
    """A slow worker's step beside a fast worker's: the updates that passed it by, and the most it was allowed."""
    window, slow = Window(width), threading.Event()
    first = window.begin()
    assert first is not None
    passed: list[int] = []

    def fast() -> None:
        for _ in range(fast_steps):
            number = window.begin()
            if number is None:
                return
            passed.append(number)
            window.end(number)
        slow.set()

    thread = threading.Thread(target=fast, daemon=True)
    thread.start()
    slow.wait(0.5 if width is not None else LIMIT)  # bounded: it stops by itself, and nobody says so
    before = len(passed)
    window.end(first)
    thread.join(LIMIT)
    assert not thread.is_alive()
    return before, len(passed)


@pytest.mark.parametrize(("width", "most"), [(0, 0), (1, 1), (3, 3), (None, 50)])
def test_nobody_gets_further_ahead_than_the_width(width: int | None, most: int) -> None:
    assert ages(width, 50) == (most, 50)


def test_at_rest_nothing_is_under_way() -> None:
    window = Window(None)
    number = window.begin()
    assert number is not None
    with pytest.raises(PeerFailure, match="did not end within"), window.rest(0.05):
        pass
    window.end(number)
    begun = threading.Event()
    thread = threading.Thread(target=lambda: (window.begin(), begun.set()), daemon=True)
    with window.rest(LIMIT):
        thread.start()
        assert not begun.wait(0.1)
    assert begun.wait(LIMIT)
    thread.join(LIMIT)


def test_closed_nothing_begins() -> None:
    window = Window(0)
    assert window.begin() == 0
    told: list[int | None] = []
    thread = threading.Thread(target=lambda: told.append(window.begin()), daemon=True)
    thread.start()
    window.close()
    thread.join(LIMIT)
    assert told == [None]
