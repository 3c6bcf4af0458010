"""Simulated climbs: what the engine would tell a policy, and what the default policy makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from omnilearn.bench import journey
from omnilearn.bench.journey import CLIMB, CLIMBS, Climb, steps_to_near, travel
from omnilearn.control import Optimal, Uniform

by_name = pytest.mark.parametrize("climb", CLIMBS, ids=lambda c: c.name)


def climb_of(name: str) -> Climb:
    return next(climb for climb in CLIMBS if name in climb.name)


@by_name
def test_lines_follow_the_cores(climb: Climb) -> None:
    equal, unequal = climb.at("HL1"), climb.at("HL8")
    assert len(set(equal.beta)) == 1
    assert unequal.beta[3] < unequal.beta[0] == unequal.beta[1] < unequal.beta[2]
    assert (unequal.alpha[3] < unequal.alpha[0]) == (climb.threads is None)


def test_without_noise_equal_batches_are_the_best_for_equals_who_all_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journey, "NEW", 1.0)
    pace = travel([climb_of("small CNN").at("HL1")] * 2, Uniform(), 10, noise=0.0)
    assert pace == pytest.approx(np.ones((2, 10)))


def test_the_same_seed_is_the_same_journey() -> None:
    stages = [climb_of("ResNet-18").at(level) for level in ("HL1", "HL8")]
    first, again, other = (travel(stages, Optimal(), 20, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert steps_to_near(np.full((1, 9), 0.95)) == [0]


@by_name
def test_no_level_is_lived_through_far_from_the_optimum(climb: Climb) -> None:
    """Also where one worker alone is best, and another one than on the level before: that must be looked for among the
    parked, whose lines were learnt in a few steps."""
    stages = [climb.at(level) for level in CLIMB]
    paces = [travel(stages, Optimal(), 120, seed=seed) for seed in range(8)]
    late = np.array([np.median(pace[:, 60:], axis=1) for pace in paces])  # seeds × stages
    # One worker alone is on HL2 up to a third slower than another, which a look at who is parked hardly shows.
    assert late.min() > 0.7
    assert np.delete(late, CLIMB.index("HL2"), axis=1).min() > 0.85
    assert np.median(late) > 0.95
