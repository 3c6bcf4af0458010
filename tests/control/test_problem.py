"""Problems are checked when they are made: what cannot be solved says why, with the values and the way out."""

from __future__ import annotations

import numpy as np
import pytest

from omnilearn import control
from omnilearn.control import Plan, Problem
from omnilearn.errors import InfeasibleError, OmniLearnError


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Problem.of(64, workers=0), ["at least one worker", "0"]),
        (lambda: Problem.of(64), ["at least one worker"]),
        (lambda: Problem.of(64, speeds=[]), ["at least one worker"]),
        (lambda: Problem.of(0, workers=2), ["global_batch", "at least 1", "0"]),
        (lambda: Problem.of(-8, workers=2), ["global_batch", "-8"]),
        (lambda: Problem.of(64, workers=2, multiple_of=0), ["multiple_of", "0"]),
        (lambda: Problem.of(65, workers=2, multiple_of=8), ["65", "multiple_of 8", "use 64 or 72"]),
        (lambda: Problem.of(3, workers=1, multiple_of=8), ["use 8"]),
        (lambda: Problem.of(64, workers=2, minimum=0), ["minimum", "at least 1", "[0, 0]"]),
        (lambda: Problem.of(64, workers=2, minimum=[1, 2, 3]), ["minimum", "3 values for 2 workers"]),
        (lambda: Problem.of(64, workers=2, minimum=20, maximum=[30, 10]), ["worker 1", "20", "10", "raise max_batch"]),
        (lambda: Problem.of(64, workers=2, minimum=9, maximum=15, multiple_of=16), ["worker 0", "multiple of 16"]),
        (lambda: Problem.of(64, workers=2, maximum=31), ["maximums hold 62", "64", "raise max_batch", "[31, 31]"]),
        (
            lambda: Problem.of(64, workers=3, minimum=[30, 30, 10], park=False),
            ["global_batch 64", "minimums 70", "lower min_batch", "parked", "[30, 30, 10]"],
        ),
        (lambda: Problem.of(8, workers=2, minimum=[9, 10]), ["global_batch 8", "smallest: 9", "raise global_batch"]),
        (lambda: Problem.of(8, speeds=[1.0, 0.0]), ["speeds", "positive", "[1.0, 0.0]"]),
        (lambda: Problem.of(8, speeds=[1.0, float("nan")]), ["speeds", "nan"]),
        (lambda: Problem.of(8, workers=3, speeds=[1.0, 2.0]), ["speeds", "one positive number per worker"]),
    ],
)
def test_infeasible_problems_name_the_values_and_the_way_out(make, words: list[str]) -> None:
    with pytest.raises(InfeasibleError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, OmniLearnError)
    assert isinstance(caught.value, ValueError)


def test_long_lists_are_cut_short_in_messages() -> None:
    with pytest.raises(InfeasibleError) as caught:
        Problem.of(10**6, workers=1000, maximum=10)
    assert "(1000 values)" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_numbers_stand_for_all_workers() -> None:
    problem = Problem.of(64, workers=3, minimum=4, maximum=[32, 32, 8])
    assert problem.minimum.tolist() == [4, 4, 4]
    assert problem.maximum.tolist() == [32, 32, 8]
    assert problem.speeds.tolist() == [1, 1, 1]
    low, high = Problem.of(32, workers=2, minimum=3, maximum=30, multiple_of=8).units
    assert (low.tolist(), high.tolist()) == ([1, 1], [3, 3])


@pytest.mark.parametrize(
    ("batches", "ok"),
    [
        ([8, 8], True),
        ([16, 0], True),
        ([8, 7], False),  # the sum
        ([12, 4], True),
        ([14, 2], False),  # the minimum
        ([10, 6], False),  # the multiple
        ([20, -4], False),
        ([16], False),
    ],
)
def test_check(batches: list[int], ok: bool) -> None:
    problem = Problem.of(16, workers=2, minimum=4, maximum=16, multiple_of=4)
    if ok:
        problem.check(np.array(batches))
    else:
        with pytest.raises(InfeasibleError, match="not a split"):
            problem.check(np.array(batches))


def test_nobody_is_parked_where_parking_is_off() -> None:
    with pytest.raises(InfeasibleError):
        Problem.of(16, workers=2, park=False).check(np.array([16, 0]))


def test_a_plan_says_who_is_parked_and_what_it_gains() -> None:
    plan = Plan((5, 0, 3), "park: try", predicted=0.5, instead_of=2.0)
    assert (plan.active, plan.parked, plan.gain) == ((0, 2), (1,), 0.75)
    assert Plan((5,)).gain == 0.0
    assert plan == Plan((5, 0, 3), "park: try")  # predictions are remarks, not part of what a plan is


def test_policies_by_name_or_object() -> None:
    for name, kind in control.POLICIES.items():
        assert type(control.policy(name)) is kind
    mine = control.Optimal(gain=0.1)
    assert control.policy(mine) is mine
    with pytest.raises(InfeasibleError, match=r"'best'.*optimal, proportional, static, uniform"):
        control.policy("best")
    with pytest.raises(InfeasibleError, match="int"):
        control.policy(3)  # type: ignore[arg-type]
