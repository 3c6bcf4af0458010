"""What a set of workers could do at best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from control_helpers import problems
from hypothesis import given
from hypothesis import strategies as st

from omnilearn.control import Problem
from omnilearn.control.curves import Curves
from omnilearn.control.subsets import at_best, at_very_best, feasible, predicted, split_over


@given(problems(), st.data())
def test_no_split_is_faster_than_at_best(problem: Problem, data: st.DataObject) -> None:
    n = problem.workers
    fixed = data.draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    per_sample = data.draw(st.lists(st.floats(1e-4, 0.1), min_size=n, max_size=n))
    workers = tuple(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))))
    if not feasible(problem, workers):
        return
    curves = replace(Curves.guess(problem.speeds), alpha=np.asarray(fixed), beta=np.asarray(per_sample))
    cost = np.linspace(0, 0.1, n + 1)
    split = split_over(problem, curves, workers)
    assert at_best(problem, curves, workers, cost) <= predicted(split, curves, cost) * (1 + 1e-12)
    assert at_very_best(problem, curves, cost) <= at_best(problem, curves, workers, cost) * (1 + 1e-12)


def test_a_leap_is_judged_with_passes_in_mind() -> None:
    """A worker that computes two samples at a time pays its fixed part four times for eight."""
    problem = replace(Problem.of(64, workers=2), micro=np.array([2, 1 << 40]))
    curves = replace(
        Curves.guess([1, 1]),
        alpha=np.array([1.0, 0.5]),
        beta=np.array([0.001, 0.4375]),
        at=np.array([8.0, 8.0]),
        micro=problem.micro,
    )
    split = split_over(problem, curves, (0, 1))
    assert predicted(split, curves, np.zeros(3)) < 16  # at best: 30 and 34 in 15.4


def test_at_best_is_what_whole_samples_reach_when_they_fit() -> None:
    curves = replace(Curves.guess([1, 1]), alpha=np.array([0.1, 0.2]), beta=np.array([0.01, 0.02]))
    problem = Problem.of(40, workers=2)
    assert np.isclose(at_best(problem, curves, (0, 1), np.zeros(3)), 0.4)  # 30 and 10
    assert split_over(problem, curves, (0, 1)).tolist() == [30, 10]
