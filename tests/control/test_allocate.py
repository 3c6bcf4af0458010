"""The solver is exact: equal to trying everything, for any bounds, multiples, parking and reduction costs."""

from __future__ import annotations

import numpy as np
import pytest
from control_helpers import brute_force, problems, reordered
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from omnilearn.control import Problem, allocate, step_time
from omnilearn.errors import InfeasibleError

# Few values make ties, which are where an order of workers could creep in.
alphas = st.one_of(st.sampled_from([0.0, 0.0, 1.0, 2.0, 7.0]), st.floats(0, 10))
betas = st.one_of(st.sampled_from([0.5, 1.0, 1.0, 2.0]), st.floats(1e-3, 10))
increments = st.one_of(st.just(0.0), st.sampled_from([0.0, 1.0, 5.0]), st.floats(0, 10))


@st.composite
def curves(draw: st.DrawFn, n: int) -> tuple[list[float], list[float], list[float]]:
    """Lines for n workers, and a reduction cost that does not fall."""
    a = draw(st.lists(alphas, min_size=n, max_size=n))
    b = draw(st.lists(betas, min_size=n, max_size=n))
    steps = draw(st.lists(increments, min_size=n, max_size=n))
    return a, b, [0.0, *np.cumsum(steps).tolist()]


@st.composite
def small(draw: st.DrawFn):
    """Up to 4 workers and 24 samples, not always with a solution."""
    n, m = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 1, 2, 3]))
    total = draw(st.integers(1, 24 // m)) * m
    minimum = draw(st.one_of(st.just([1] * n), st.lists(st.integers(1, 9), min_size=n, max_size=n)))
    maximum = [low + draw(st.sampled_from([0, 1, 4, 24, 24])) for low in minimum]
    try:
        problem = Problem.of(
            total, workers=n, minimum=minimum, maximum=maximum, multiple_of=m, park=draw(st.booleans())
        )
    except InfeasibleError:
        assume(False)
    return problem, *draw(curves(n))


@settings(max_examples=400, deadline=None)
@given(small())
def test_equal_to_brute_force(case) -> None:
    problem, alpha, beta, cost = case
    best = brute_force(problem, alpha, beta, cost)
    if best is None:
        with pytest.raises(InfeasibleError, match="change global_batch, min_batch or max_batch"):
            allocate(problem, alpha, beta, cost)
        return
    batches = allocate(problem, alpha, beta, cost)
    problem.check(batches)
    time, splits = best
    assert step_time(batches, alpha, beta, cost) == pytest.approx(time, rel=1e-12)
    assert batches.tolist() in splits.tolist()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_sum_and_bounds(data: st.DataObject) -> None:
    problem = data.draw(problems(workers=12))
    problem.check(allocate(problem, *data.draw(curves(problem.workers))))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_reordering_workers_reorders_the_plan(data: st.DataObject) -> None:
    problem = data.draw(problems())
    alpha, beta, cost = data.draw(curves(problem.workers))
    order = data.draw(st.permutations(range(problem.workers)))
    a, b = np.array(alpha), np.array(beta)
    here, there = allocate(problem, a, b, cost), allocate(reordered(problem, order), a[order], b[order], cost)
    # Workers that are alike in everything (bounds count in multiples) may swap what they get.
    low, high = problem.units
    assert sorted(zip(a, b, low, high, here, strict=True)) == sorted(
        zip(a[order], b[order], low[order], high[order], there, strict=True)
    )


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans(), st.sampled_from([1, 4]))
def test_a_uniformly_faster_worker_never_gets_less(data: st.DataObject, park: bool, multiple_of: int) -> None:
    n = data.draw(st.integers(2, 6))
    alpha, beta, cost = data.draw(curves(n))
    total = data.draw(st.integers(2 * n, 60)) * multiple_of
    problem = Problem.of(total, workers=n, minimum=2 * multiple_of, multiple_of=multiple_of, park=park)
    batches = allocate(problem, alpha, beta, cost)
    for i in range(n):
        for j in range(n):
            faster = alpha[i] <= alpha[j] and beta[i] <= beta[j]
            if faster and (alpha[i], beta[i]) != (alpha[j], beta[j]):
                assert batches[i] >= batches[j]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_no_single_move_improves_a_larger_split(seed: int, n: int) -> None:
    """Too large for brute force: but moving one unit, parking one or waking one never helps."""
    random = np.random.default_rng(seed)
    alpha, beta = random.lognormal(0, 1, n), random.lognormal(-3, 1, n)
    cost = np.concatenate([[0.0], np.cumsum(random.random(n) * 0.1)])
    problem = Problem.of(int(random.integers(n, 50 * n)), workers=n)
    batches = allocate(problem, alpha, beta, cost)
    problem.check(batches)
    best = step_time(batches, alpha, beta, cost)
    active = np.flatnonzero(batches)
    for k in range(n):
        others = np.setdiff1d(active, [k]) if k in active else np.union1d(active, [k])
        if not 0 < len(others) <= problem.global_batch:
            continue
        alone = np.zeros(n, dtype=np.int64)
        alone[others] = allocate(
            Problem.of(problem.global_batch, workers=len(others), park=False), alpha[others], beta[others]
        )
        assert step_time(alone, alpha, beta, cost) >= best * (1 - 1e-12)


def test_thousands_of_workers_are_near_the_bound() -> None:
    random, n = np.random.default_rng(5), 3000
    alpha, beta = random.lognormal(-3, 0.5, n), random.lognormal(-6, 0.7, n)
    problem = Problem.of(64 * n, workers=n)
    batches = allocate(problem, alpha, beta)
    problem.check(batches)
    T = step_time(batches, alpha, beta)
    # One unit less time and the batch would not fit: no split is faster.
    assert np.floor(np.maximum(np.nextafter(T, 0) - alpha, 0) / beta + 1e-9).sum() <= 64 * n + n
    assert np.floor(np.maximum(T * (1 - 1e-3) - alpha, 0) / beta).sum() < 64 * n


@pytest.mark.parametrize(
    ("problem", "alpha", "beta", "expected"),
    [
        (Problem.of(7, workers=1), [3.0], [2.0], [7]),
        (Problem.of(1, workers=4), [1.0, 1.0, 0.5, 1.0], [1.0] * 4, [0, 0, 1, 0]),
        (Problem.of(1, workers=1, park=False), [0.0], [1.0], [1]),
        (Problem.of(10, workers=2, minimum=5, maximum=5), [0.0, 9.0], [1.0, 9.0], [5, 5]),
        (Problem.of(10, workers=2, minimum=[2, 8], maximum=[2, 8]), [0.0, 9.0], [1.0, 9.0], [2, 8]),
        (Problem.of(10, workers=3), [0.0, 99.0, 99.0], [1.0] * 3, [10, 0, 0]),
        (Problem.of(10, workers=3, park=False), [0.0, 99.0, 99.0], [1.0] * 3, [8, 1, 1]),
        (Problem.of(8, workers=2, minimum=[9, 1]), [0.0, 5.0], [1.0, 5.0], [0, 8]),  # worker 0 can only be parked
        (Problem.of(10, workers=2), [1.0, 1.0], [1e-18, 1e-18], [5, 5]),  # flatter than floating point can tell
    ],
)
def test_edges(problem: Problem, alpha: list[float], beta: list[float], expected: list[int]) -> None:
    assert allocate(problem, alpha, beta).tolist() == expected


@pytest.mark.parametrize(
    ("alpha", "beta"),
    [
        ([1.0, 2.0, 0.0], [1e-17, 1e-3, 1.0]),
        ([1e300, 0.0, 1.0], [1.0, 1e-300, 1e290]),
        ([5e-324, 0.0, 0.0], [5e-324, 5e-324, 1.0]),
        ([1e-9, 1e9, 0.0], [1e-12, 1e-12, 1e12]),
    ],
)
@pytest.mark.parametrize("total", [3, 1000, 10**9, 2**40])
@pytest.mark.parametrize("park", [True, False])
def test_extreme_lines_are_solved_and_end(alpha: list[float], beta: list[float], total: int, park: bool) -> None:
    problem = Problem.of(total, workers=3, park=park)
    problem.check(allocate(problem, alpha, beta, [0, 0, 1e-3, 2e-3]))


def test_the_reduction_cost_decides_how_many_take_part() -> None:
    problem = Problem.of(64, workers=4)
    active = [
        int((allocate(problem, [0.1] * 4, [0.01] * 4, [0, 0, c, 2 * c, 3 * c]) > 0).sum())
        for c in (0.0, 0.05, 0.12, 0.4)
    ]
    assert active == [4, 4, 2, 1]


def test_no_set_of_workers_fits() -> None:
    """One worker holds too little, two need too much: found by the solver, said clearly."""
    problem = Problem.of(8, workers=2, minimum=5, maximum=6)
    with pytest.raises(InfeasibleError, match=r"hold 8 units.*\[5 5\].*\[6 6\].*change global_batch"):
        allocate(problem, [0.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("alpha", "beta", "cost", "words"),
    [
        ([1.0], [1.0, 1.0], None, ["2 workers", "1 alphas"]),
        ([-1.0, 0.0], [1.0, 1.0], None, ["worker 0", "alpha=-1.0", "check the timings"]),
        ([0.0, 0.0], [1.0, 0.0], None, ["worker 1", "beta=0.0"]),
        ([0.0, float("nan")], [1.0, 1.0], None, ["worker 1", "nan"]),
        ([0.0, 0.0], [1.0, float("inf")], None, ["worker 1", "inf"]),
        ([0.0, 0.0], [1.0, 1.0], [0.0, 2.0, 1.0], ["reduce_cost", "do not fall"]),
        ([0.0, 0.0], [1.0, 1.0], [0.0, 1.0], ["reduce_cost", "3 finite values"]),
    ],
)
def test_wrong_curves_are_named(alpha, beta, cost, words: list[str]) -> None:
    with pytest.raises(InfeasibleError) as caught:
        allocate(Problem.of(8, workers=2), alpha, beta, cost)
    for word in words:
        assert word in str(caught.value)


def test_same_input_same_plan() -> None:
    random = np.random.default_rng(0)
    alpha, beta = random.random(50), random.random(50) + 0.01
    problem = Problem.of(1000, workers=50)
    assert allocate(problem, alpha, beta).tolist() == allocate(problem, alpha.copy(), beta.copy()).tolist()
