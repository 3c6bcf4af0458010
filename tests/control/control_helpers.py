"""What the tests of control/ draw from: problems that have a solution, and the brute force they are compared with."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from omnilearn.control import Problem


@st.composite
def problems(draw: st.DrawFn, *, workers: int = 6, everybody: bool = False, most: int = 200) -> Problem:
    """A problem with a solution: a set of workers is drawn, and a global batch between its bounds.

    ``everybody``: the set is all workers, so that policies that never park can solve it too.
    """
    n = draw(st.integers(1, workers))
    m = draw(st.sampled_from([1, 1, 2, 3, 8]))
    low = draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
    room = draw(st.lists(st.sampled_from([0, 1, 3, 20, most]), min_size=n, max_size=n))
    high = [a + b for a, b in zip(low, room, strict=True)]
    chosen = [True] * n if everybody else draw(st.lists(st.booleans(), min_size=n, max_size=n))
    if not any(chosen):
        chosen[0] = True
    least = sum(a for a, on in zip(low, chosen, strict=True) if on)
    total = draw(st.integers(least, min(sum(b for b, on in zip(high, chosen, strict=True) if on), least + most)))
    # Minimums and maximums need not be multiples themselves: what counts is that a multiple lies between them.
    minimum = [a * m - draw(st.integers(0, m - 1)) for a in low]
    maximum = [b * m + draw(st.integers(0, m - 1)) for b in high]
    speeds = draw(st.lists(st.sampled_from([0.5, 1.0, 1.0, 4.0, 32.0]), min_size=n, max_size=n))
    park = not everybody or draw(st.booleans())
    if sum(low) > total:
        park = True
    return Problem.of(total * m, speeds=speeds, minimum=minimum, maximum=maximum, multiple_of=m, park=park)


def reordered(problem: Problem, order: list[int]) -> Problem:
    """The same problem with its workers in another order."""
    return Problem(
        problem.global_batch,
        problem.speeds[order],
        problem.minimum[order],
        problem.maximum[order],
        problem.multiple_of,
        problem.park,
    )


@lru_cache(maxsize=64)
def _splits(workers: int, total: int) -> npt.NDArray[np.int64]:
    """All ways to write ``total`` as an ordered sum of ``workers`` whole numbers, zeros included."""
    rows = [(*head, total - sum(head)) for head in product(range(total + 1), repeat=workers - 1) if sum(head) <= total]
    return np.array(rows, dtype=np.int64)


def brute_force(
    problem: Problem, alpha: npt.ArrayLike, beta: npt.ArrayLike, cost: npt.ArrayLike
) -> tuple[float, npt.NDArray[np.int64]] | None:
    """The least step time and the splits that reach it, by trying all (None: there is no valid split)."""
    a, b, c = np.asarray(alpha, float), np.asarray(beta, float), np.asarray(cost, float)
    m = problem.multiple_of
    splits = _splits(problem.workers, problem.global_batch // m) * m
    inside = (splits >= problem.minimum) & (splits <= problem.maximum)
    splits = splits[(inside | (splits == 0) if problem.park else inside).all(axis=1)]
    if not len(splits):
        return None
    times = np.where(splits > 0, a + b * splits, 0.0).max(axis=1) + c[(splits > 0).sum(axis=1)]
    return float(times.min()), splits[times <= times.min() * (1 + 1e-12)]
