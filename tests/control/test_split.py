"""Whole numbers in given proportions."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilearn.control import apportion

weights = st.one_of(st.floats(1e-6, 1e6), st.sampled_from([0.0, 1.0, 2.0, 3.0]))


@st.composite
def cases(draw: st.DrawFn):
    n = draw(st.integers(1, 8))
    w = draw(st.lists(weights, min_size=n, max_size=n).filter(any))
    low = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    high = [a + draw(st.sampled_from([0, 1, 5, 1000])) for a in low]
    total = draw(st.integers(sum(low), sum(high)))
    return np.array(w), total, np.array(low), np.array(high)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_sum_and_bounds(case) -> None:
    w, total, low, high = case
    shares = apportion(w, total, low, high)
    assert shares.sum() == total
    assert np.all((low <= shares) & (shares <= high))


@settings(max_examples=200, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_order_does_not_matter(case, random) -> None:
    w, total, low, high = case
    order = list(range(len(w)))
    random.shuffle(order)
    here = apportion(w, total, low, high)
    there = apportion(w[order], total, low[order], high[order])
    assert sorted(zip(w, low, high, here, strict=True)) == sorted(
        zip(w[order], low[order], high[order], there, strict=True)
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(weights, min_size=1, max_size=8).filter(any), st.integers(0, 500), st.integers(0, 9))
def test_a_larger_weight_never_gets_less(w: list[float], extra: int, low: int) -> None:
    n = len(w)
    shares = apportion(np.array(w), n * low + extra, np.full(n, low), np.full(n, low + 500))
    assert all(a >= b for v, a in zip(w, shares, strict=True) for u, b in zip(w, shares, strict=True) if v > u)


def test_ratios_are_kept() -> None:
    one, high = np.ones(4, int), np.full(4, 10**9)
    assert apportion(np.array([6.0, 6, 4, 32]), 48, one, high).tolist() == [6, 6, 4, 32]
    assert apportion(np.array([6.0, 6, 4, 32]), 480, one, high).tolist() == [60, 60, 40, 320]
    assert apportion(np.array([1.0, 1, 1, 1]), 10**9 + 2, one, high).sum() == 10**9 + 2


def test_what_a_bound_takes_the_others_share() -> None:
    low, high = np.array([1, 1, 1]), np.array([100, 100, 10])
    assert apportion(np.array([1.0, 1, 8]), 100, low, high).tolist() == [45, 45, 10]
    assert apportion(np.array([1.0, 1, 98]), 100, np.array([10, 1, 1]), np.full(3, 100)).tolist() == [10, 1, 89]


def test_huge_and_tiny() -> None:
    assert apportion(np.array([1e-300, 1e300]), 10, np.ones(2, int), np.full(2, 10)).tolist() == [1, 9]
    assert apportion(np.array([3.0]), 1, np.ones(1, int), np.ones(1, int)).tolist() == [1]
    big = apportion(np.arange(1.0, 8), 10**12 + 7, np.ones(7, int), np.full(7, 2**40))
    assert big.sum() == 10**12 + 7
    assert np.all(np.diff(big) > 0)
