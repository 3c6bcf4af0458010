"""A batch above what memory holds takes several passes, each with its fixed cost: fitted, and solved for exactly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from control_helpers import _splits
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from omnilearn.control import Curves, Optimal, Problem, Report, allocate, step_time
from omnilearn.control.curves import passes
from omnilearn.errors import InfeasibleError


@st.composite
def cases(draw: st.DrawFn):
    n, m = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3]))
    total = draw(st.integers(1, 24 // m)) * m
    minimum = draw(st.lists(st.integers(1, 3), min_size=n, max_size=n))
    micro = draw(st.lists(st.sampled_from([1, 2, 3, 5, 7, 40]), min_size=n, max_size=n))
    alpha = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0, 0.1]), min_size=n, max_size=n))
    beta = draw(st.lists(st.sampled_from([0.1, 0.5, 1.0, 3.7]), min_size=n, max_size=n))
    cost = [0.0, *np.cumsum(draw(st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=n, max_size=n))).tolist()]
    try:
        problem = Problem.of(total, workers=n, minimum=minimum, multiple_of=m, park=draw(st.booleans()), micro=micro)
    except InfeasibleError:
        assume(False)
    return problem, alpha, beta, cost


@settings(max_examples=300, deadline=None)
@given(cases())
def test_equal_to_brute_force(case) -> None:
    problem, alpha, beta, cost = case
    splits = _splits(problem.workers, problem.global_batch // problem.multiple_of) * problem.multiple_of
    good = (splits >= problem.minimum) | ((splits == 0) & problem.park)
    splits = splits[good.all(axis=1)]
    assume(len(splits) > 0)
    best = min(step_time(split, alpha, beta, cost, problem.micro) for split in splits)
    batches = allocate(problem, alpha, beta, cost)
    problem.check(batches)
    assert step_time(batches, alpha, beta, cost, problem.micro) == pytest.approx(best, rel=1e-12)


def test_a_little_more_than_fits_goes_elsewhere() -> None:
    alpha, beta = [1.0, 1.0], [0.01, 0.02]
    assert allocate(Problem.of(96, workers=2), alpha, beta).tolist() == [64, 32]
    # A second pass for the few beyond 60 would cost a second more.
    assert allocate(Problem.of(96, workers=2, micro=[60, 96]), alpha, beta).tolist() == [60, 36]
    # But where most do not fit, it is worth it.
    few = allocate(Problem.of(960, workers=2, micro=[60, 1000]), [0.1, 1.0], [0.01, 0.05])
    assert few[0] > 5 * 60


def test_the_example_of_the_documentation() -> None:
    """docs/memory.md: a 24 GB and an 11 GB card."""
    found = {
        (size, cut): allocate(
            Problem.of(size, workers=2, micro=[400, 180] if cut else None), [0.03, 0.04], [1e-3, 1.6e-3]
        )
        for size in (512, 1024)
        for cut in (False, True)
    }
    assert [batches.tolist() for batches in found.values()] == [[319, 193], [332, 180], [634, 390], [653, 371]]


def test_the_fixed_part_is_that_of_one_pass() -> None:
    curves = replace(Curves.guess([1.0]), micro=np.array([32]))
    for b in [16, 40, 100, 30, 64] * 12:
        curves = curves.observe([b], [0.1 * -(-b // 32) + 0.002 * b])
    assert curves.alpha[0] == pytest.approx(0.1, rel=0.05)
    assert curves.beta[0] == pytest.approx(0.002, rel=0.05)
    assert curves.times([96])[0] == pytest.approx(0.3 + 0.192, rel=0.02)
    assert Curves.from_state(curves.state_dict()).alpha[0] == curves.alpha[0], "a checkpoint has nothing of memory"


@pytest.mark.parametrize("small", [24, 40, 100])
def test_the_policy_accounts_for_a_small_memory(small: int) -> None:
    """Two equally fast workers, one with little memory: within 3% of the best split there is, in 30 reports."""
    problem = Problem.of(256, workers=2, micro=[10**6, small], park=False)
    alpha, beta, random = np.array([0.05, 0.05]), np.array([0.001, 0.001]), np.random.default_rng(1)

    def truth(b: np.ndarray) -> np.ndarray:
        return alpha * passes(b.astype(float), problem.micro) + beta * b

    policy = Optimal()
    state = policy.start(problem)
    for _ in range(30):
        b = np.asarray(state.plan.batches)
        busy = truth(b) * (1 + 0.01 * random.standard_normal((2, 2)))
        report = Report.of([b, b], busy, busy.max(axis=1, keepdims=True) - busy)
        state = policy.update(problem, state, report)
    best = min(truth(np.array([k, 256 - k])).max() for k in range(1, 256))
    assert truth(np.asarray(state.plan.batches)).max() <= 1.03 * best


def test_memory_may_become_known_while_training_runs() -> None:
    """The planner replaces the problem's micro-batches when a worker has learned its own."""
    policy, known = Optimal(), Problem.of(96, workers=2, park=False)
    state = policy.start(known)
    for micro in [[0, 500]] * 8 + [[20, 0]] * 16:
        known = known.holding(micro)
        b = np.asarray(state.plan.batches)
        busy = 0.1 * passes(b.astype(float), known.micro) + 0.001 * b
        state = policy.update(known, state, Report.of(b, busy, busy.max() - busy))
    b = np.asarray(state.plan.batches)
    assert b[0] in (20, 40), "full passes only"
    with pytest.raises(InfeasibleError, match="micro"):
        replace(known, micro=np.array([0, 1]))
