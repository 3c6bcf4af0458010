"""Ratios to the best of several noisy contestants: luck is left out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from omnilearn.bench.oracle import Curve, Search
from omnilearn.bench.sync import ENOUGH, LONG_BLOCK, Contest, effort


def contest(seconds: dict[str, np.ndarray]) -> Contest:
    """One whose contestants took so many seconds for a step, by round."""
    nothing: Any = None
    made = Contest(nothing, "HL1", "heavy", nothing, effort(quick=True), nothing)
    for name, rounds in seconds.items():
        made.rounds[name] = [SimpleNamespace(seconds=np.array([t])) for t in rounds]  # type: ignore[misc]
    return made


def test_equal_contestants_are_equal_although_one_of_them_was_the_luckiest() -> None:
    random = np.random.default_rng(0)
    names, fractions, lucky = [str(k) for k in range(6)], [], []
    for _ in range(300):
        rounds = {name: 1 + 0.1 * random.standard_normal(4) for name in [*names, "optimal"]}
        fractions.append(contest(rounds)._ratio_to_best("optimal", names)["median"])
        lucky.append(min(np.median(rounds[name]) for name in names) / np.median(rounds["optimal"]))
    assert abs(np.mean(fractions) - 1) < 0.01
    assert np.mean(lucky) < 0.95  # what it would be otherwise


def test_one_that_is_faster_in_every_round_is_the_best() -> None:
    rounds = {"a": np.full(4, 1.0), "b": np.array([0.7, 0.8, 0.8, 0.8]), "optimal": np.full(4, 0.8)}
    assert contest(rounds)._ratio_to_best("optimal", ["a", "b"])["median"] == 1.0
    assert contest(rounds)._ratio_to_best("optimal", ["a"])["median"] == 1.25
    once = {name: times[:1] for name, times in rounds.items()}
    assert contest(once)._ratio_to_best("optimal", ["a", "b"])["median"] == 0.7 / 0.8


def test_where_steps_take_seconds_there_are_fewer() -> None:
    made, split = contest({}), (32, 32)
    made.how = replace(made.how, rounds=4, block=10, skip=2, longest=240.0)

    def steps(seconds: float) -> int:
        made.search = Search(Curve(np.zeros(2), np.full(2, seconds / 32), np.zeros(3), []))
        return made._fixed(split)[0]

    assert steps(0.1) == 10
    assert steps(LONG_BLOCK / 7) == 7
    assert steps(100.0) == 2 + ENOUGH
    assert [made._another(count, 0.0) for count in (0, 3, 4)] == [True, True, False]
    assert made._another(ENOUGH - 1, 1000.0)
    assert not made._another(ENOUGH, 1000.0)
    made.how = replace(made.how, longest=None, seconds=150.0)
    assert made._another(9, 100.0)
    assert not made._another(9, 151.0)
