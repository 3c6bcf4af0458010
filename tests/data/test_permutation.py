"""The order of an epoch: a true permutation, that looks random, and takes no memory."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnilearn.data import Permutation
from omnilearn.errors import InfeasibleError, UsageError


def excess(seen: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts seen against those expected, in standard deviations from its mean."""
    possible = expected > 0
    assert not seen[~possible].any()
    freedom = int(possible.sum()) - 1
    chi2 = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    return abs(float(chi2) - freedom) / math.sqrt(2 * freedom)


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**64), epoch=st.integers(0, 10**6))
@settings(deadline=None)
@example(size=1, seed=0, epoch=0)
@example(size=2, seed=0, epoch=0)
@example(size=4097, seed=0, epoch=0)
def test_each_index_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(size, seed, epoch)(0, size).tolist()) == list(range(size))


def test_each_index_once_for_every_small_size() -> None:
    for size in range(1, 200):
        assert sorted(Permutation(size, 1, 2)(0, size).tolist()) == list(range(size))


def test_each_index_once_for_a_large_size() -> None:
    size = 3_000_017
    seen = np.zeros(size, dtype=bool)
    order = Permutation(size, 5, 1)
    for start in range(0, size, 500_000):
        seen[order(start, min(size, start + 500_000))] = True
    assert seen.all()


@given(data=st.data(), size=st.integers(1, 2000))
def test_a_part_is_the_same_as_that_part_of_the_whole(data: st.DataObject, size: int) -> None:
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    order = Permutation(size, 3, 4)
    assert order(start, stop).tolist() == order(0, size)[start:stop].tolist()


@pytest.mark.parametrize("size", [5, 7, 10, 31, 500, 2000])
def test_positions_and_neighbours_are_uniform_over_epochs(size: int) -> None:
    epochs, bins = 800, min(size, 10)
    of = np.arange(size) * bins // size
    per_bin = np.bincount(of)
    single = per_bin / size * epochs
    pair = (np.outer(per_bin, per_bin) - np.diag(per_bin)) / (size * (size - 1)) * epochs
    orders = [Permutation(size, 11, epoch) for epoch in range(epochs)]
    for at in (0, size - 2):
        two = of[np.array([order(at, at + 2) for order in orders])]
        assert excess(np.bincount(two[:, 0], minlength=bins), single) < 5
        neighbours = np.bincount(two[:, 0] * bins + two[:, 1], minlength=bins * bins).reshape(bins, bins)
        assert excess(neighbours, pair) < 5


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_orders_of_a_few_samples_are_alike_likely(size: int) -> None:
    each, orders = 5, math.factorial(size)
    seen = Counter(tuple(Permutation(size, 7, epoch)(0, size).tolist()) for epoch in range(each * orders))
    counts = np.array(list(seen.values()) + [0] * (orders - len(seen)))
    assert excess(counts, np.full(orders, each)) < 5


def test_a_long_stretch_has_no_trend() -> None:
    order = Permutation(100_000_000, 0, 0)(123_456, 223_456).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(order.size))[0, 1]) < 0.02
    assert abs(order.mean() / 50_000_000 - 1) < 0.02
    assert abs((np.diff(order) > 0).mean() - 0.5) < 0.01


def test_epochs_and_seeds_give_unrelated_orders() -> None:
    size = 10_000
    orders = [Permutation(size, seed, epoch)(0, size) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 12  # 1 on average
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


def test_the_order_never_changes_between_versions() -> None:
    """A checkpoint's offset is worth nothing if the permutation behind it changes."""
    assert Permutation(10, 0, 0)(0, 10).tolist() == [7, 3, 6, 2, 9, 4, 8, 0, 5, 1]
    assert Permutation(100_000_000, 42, 3)(99_999_996, 100_000_000).tolist() == [
        23935500,
        22410321,
        5488135,
        59234167,
    ]


def test_without_shuffle_the_order_is_the_datasets_own() -> None:
    assert Permutation(100_000_000, 0, 0, shuffle=False)(99_999_997, 100_000_000).tolist() == [
        99_999_997,
        99_999_998,
        99_999_999,
    ]


def test_memory_does_not_grow_with_the_dataset() -> None:
    tracemalloc.start()
    try:
        Permutation(100_000_000, 0, 0)(50_000_000, 50_004_096)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def test_errors_name_the_values() -> None:
    with pytest.raises(InfeasibleError, match="got 0"):
        Permutation(0, 0, 0)
    with pytest.raises(InfeasibleError, match="seed -1"):
        Permutation(5, -1, 0)
    for start, stop in [(-1, 3), (3, 2), (0, 11)]:
        with pytest.raises(UsageError, match=f"{start} to {stop} are not within the 10"):
            Permutation(10, 0, 0)(start, stop)
