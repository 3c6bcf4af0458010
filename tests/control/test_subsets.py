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


def test_at_best_is_what_whole_samples_reach_when_they_fit() -> None:
    curves = replace(Curves.guess([1, 1]), alpha=np.array([0.1, 0.2]), beta=np.array([0.01, 0.02]))
    problem = Problem.of(40, workers=2)
    assert np.isclose(at_best(problem, curves, (0, 1), np.zeros(3)), 0.4)  # 30 and 10
    assert split_over(problem, curves, (0, 1)).tolist() == [30, 10]
