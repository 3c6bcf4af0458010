"""Whoever takes turns is treated alike."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from omnilearn.bench.turns import order


@pytest.mark.parametrize("count", range(1, 13))
def test_everybody_comes_everywhere_and_after_everybody(count: int) -> None:
    names = [f"contestant {k}" for k in range(count)]
    rounds = [order(names, turn) for turn in range(count * (1 + count % 2))]
    assert all(sorted(row) == sorted(names) for row in rounds)
    times = len(rounds) // count
    places = Counter((name, place) for row in rounds for place, name in enumerate(row))
    assert set(places.values()) == {times}
    after = Counter(pair for row in rounds for pair in pairwise(row))
    assert len(after) == count * (count - 1)
    assert set(after.values()) <= {times}


def test_it_goes_on_from_the_start() -> None:
    assert order("abc", 6) == order("abc", 0)
    assert order("abcd", 4) == order("abcd", 0)
