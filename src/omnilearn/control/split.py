"""Whole numbers in given proportions: used where a policy or the tail of an epoch names a ratio, not a time."""

from __future__ import annotations

import numpy as np

from omnilearn.control.problem import Floats, Ints
from omnilearn.errors import InfeasibleError


def apportion(weights: Floats, total: int, minimum: Ints, maximum: Ints) -> Ints:
    """Split ``total`` in proportion to ``weights`` within bounds, by largest remainder.

    Needs ``minimum.sum() <= total <= maximum.sum()``. A larger weight with the same bounds never gets less.

    >>> apportion(np.array([6.0, 6, 4, 32]), 64, np.ones(4, int), np.full(4, 64)).tolist()
    [8, 8, 5, 43]
    """
    weights, minimum, maximum = np.asarray(weights, float), np.asarray(minimum), np.asarray(maximum)
    if not minimum.sum() <= total <= maximum.sum():
        raise InfeasibleError(f"{total} cannot be split within {minimum.tolist()[:8]} and {maximum.tolist()[:8]}")
    # The scale λ with Σ clip(λ·w, minimum, maximum) = total, by bisection: the sum grows with λ.
    positive = np.maximum(weights, weights.max() * 1e-12)
    low, high = 0.0, float((maximum / positive).max())
    for _ in range(100):
        scale = (low + high) / 2
        if np.clip(scale * positive, minimum, maximum).sum() < total:
            low = scale
        else:
            high = scale
        if high - low <= 1e-13 * high:
            break
    exact = np.clip(high * positive, minimum, maximum)
    # A hair is added before rounding down, so that 7.999999999 is 8 and not 7 with a remainder.
    shares = np.clip(np.floor(exact + 1e-9 * np.maximum(1.0, exact)), minimum, maximum).astype(np.int64)
    # Largest remainder first; among equal remainders the larger weight, then the wider bounds: values decide, and the
    # order of workers does not matter.
    order = np.lexsort((minimum, -maximum, -weights, -np.round(exact - shares, 9)))
    while (missing := int(total - shares.sum())) != 0:
        room = (
            order[shares[order] < maximum[order]]
            if missing > 0
            else order[::-1][shares[order[::-1]] > minimum[order[::-1]]]
        )
        shares[room[: abs(missing)]] += 1 if missing > 0 else -1
    return shares  # type: ignore[no-any-return]
