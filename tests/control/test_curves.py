"""Lines fitted while training runs: usable at once, hard to fool, quick to forget."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilearn.control import Curves
from omnilearn.errors import InfeasibleError


def fitted(alpha: float, beta: float, batches, noise: float = 0.0, seed: int = 0) -> Curves:
    """One worker's line after measurements at these batches."""
    random = np.random.default_rng(seed)
    curves = Curves.guess([1.0])
    for b in batches:
        curves = curves.observe([b], [(alpha + beta * b) * (1 + noise * random.standard_normal())])
    return curves


def test_before_the_first_measurement_nominal_speeds_count() -> None:
    times = Curves.guess([1.0, 4.0]).times([32, 32])
    assert times[0] / times[1] == 4


def test_the_first_measurement_sets_a_proportional_line() -> None:
    curves = Curves.guess([1.0, 7.0]).observe([32, 16], [0.64, 0.8])
    assert curves.alpha.tolist() == [0, 0]
    np.testing.assert_allclose(curves.beta, [0.02, 0.05])
    assert curves.seen.tolist() == [1, 1]


@pytest.mark.parametrize(("alpha", "beta"), [(0.02, 0.0001), (0.1, 0.003), (0.0, 0.01), (0.15, 0.0014)])
def test_alpha_and_beta_are_recovered(alpha: float, beta: float) -> None:
    curves = fitted(alpha, beta, [32, 64, 16, 48] * 10)
    np.testing.assert_allclose(curves.times([8, 32, 128]), alpha + beta * np.array([8, 32, 128]), rtol=0.01)
    np.testing.assert_allclose(curves.alpha, alpha, atol=0.01 * (alpha + beta * 32))


def test_alpha_and_beta_are_recovered_from_noise() -> None:
    found = [fitted(0.1, 0.003, [16, 64, 32, 96] * 20, noise=0.05, seed=s) for s in range(20)]
    assert np.median([c.alpha[0] for c in found]) == pytest.approx(0.1, rel=0.1)
    assert np.median([c.beta[0] for c in found]) == pytest.approx(0.003, rel=0.1)


def test_a_spike_barely_moves_the_line() -> None:
    before = fitted(0.05, 0.002, [32, 64, 48, 40] * 5, noise=0.03)
    spiked = before.observe([48], [10 * (0.05 + 0.002 * 48)])
    np.testing.assert_array_equal(spiked.times([16, 48, 128]), before.times([16, 48, 128]))
    after = spiked.observe([48], [0.05 + 0.002 * 48])  # and ordinary measurements are ordinary again
    np.testing.assert_allclose(after.times([16, 48, 128]), before.times([16, 48, 128]), rtol=0.03)


def test_spikes_now_and_then_barely_move_the_line() -> None:
    curves, random = fitted(0.05, 0.002, [32, 64, 48, 40] * 5, noise=0.03), np.random.default_rng(1)
    for i in range(100):
        b = (32, 40, 48, 64)[i % 4]
        spike = 10 if i % 10 == 5 else 1
        curves = curves.observe([b], [spike * (0.05 + 0.002 * b) * (1 + 0.03 * random.standard_normal())])
    np.testing.assert_allclose(curves.times([32, 64]), 0.05 + 0.002 * np.array([32, 64]), rtol=0.05)


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 4.0, 20.0])
def test_a_change_of_speed_is_recognised_by_the_second_measurement(factor: float) -> None:
    curves = fitted(0.05, 0.002, [32, 64, 48, 40] * 20, noise=0.03)
    now = factor * (0.05 + 0.002 * np.array([24.0, 48, 96]))
    for _ in range(2):
        curves = curves.observe([48], [now[1]])
    # The line keeps its shape and takes the new scale: known at other batches too.
    np.testing.assert_allclose(curves.times([24, 48, 96]), now, rtol=0.06)


@pytest.mark.parametrize("factor", [0.8, 0.88, 1.12, 1.2])
def test_a_change_too_small_to_stand_out_is_followed_within_some_measurements(factor: float) -> None:
    random, found = np.random.default_rng(1), []
    for _ in range(30):
        curves = fitted(0.1, 0.002, [48, 64, 80] * 20 + [64] * 60, noise=0.04, seed=int(random.integers(1000)))
        for _ in range(10):
            seconds = factor * 0.228 * (1 + 0.04 * random.standard_normal())
            curves = curves.observe([64], [seconds])
        found.append(curves.times([64])[0] / 0.228)
    assert np.median(found) == pytest.approx(factor, rel=0.04)


def test_noise_alone_is_no_change() -> None:
    changes = [int(fitted(0.1, 0.002, [64] * 300, noise=0.05, seed=seed).changes[0]) for seed in range(20)]
    assert np.mean(changes) <= 3.5  # about one in a hundred: the price of following small changes soon


def test_what_was_before_a_change_is_forgotten_at_once() -> None:
    curves = fitted(0.05, 0.002, [32, 64, 48, 40] * 50)
    for b in (48, 48, 32, 64, 48, 96):  # from now on another line, not just a multiple of the old one
        curves = curves.observe([b], [0.02 + 0.02 * b])
    np.testing.assert_allclose(curves.times([32, 64, 96]), 0.02 + 0.02 * np.array([32, 64, 96]), rtol=0.05)


def test_spikes_on_both_sides_are_no_change() -> None:
    before = fitted(0.05, 0.002, [32, 64, 48, 40] * 5)
    after = before.observe([48], [1.46]).observe([48], [0.0146])
    np.testing.assert_array_equal(after.times([32, 64]), before.times([32, 64]))


def test_a_long_steady_phase_keeps_alpha() -> None:
    known = fitted(0.1, 0.003, [16, 64, 32, 96] * 5)
    random, curves = np.random.default_rng(3), known
    for _ in range(2000):
        curves = curves.observe([32], [0.196 * (1 + 0.05 * random.standard_normal())])
    assert curves.alpha[0] == pytest.approx(0.1, rel=0.3)
    assert curves.times([32])[0] == pytest.approx(0.196, rel=0.05)


def test_uncertainty_of_alpha_falls_when_batches_differ() -> None:
    never = Curves.guess([1.0]).alpha_uncertainty([32])
    once, same, different = fitted(0.1, 0.003, [32]), fitted(0.1, 0.003, [32] * 8), fitted(0.1, 0.003, [32, 64] * 4)
    assert np.isinf(never[0])
    assert different.alpha_uncertainty([32])[0] < 0.2 < same.alpha_uncertainty([32])[0]
    assert np.isfinite(once.alpha_uncertainty([32])[0])


def test_equal_shares_are_predicted_only_where_the_line_is_sure() -> None:
    assert Curves.guess([1.0]).equal_shares(64) is None
    near = fitted(0.1, 0.001, [32] * 6)
    assert near.equal_shares(32) == pytest.approx(0.132)
    assert near.equal_shares(128) is None  # α may be all of it or nothing
    assert fitted(0.1, 0.001, [16, 32, 48] * 4).equal_shares(128) == pytest.approx(0.228, rel=0.1)


measurement = st.tuples(st.integers(0, 10**6), st.floats(-14, 9))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(measurement, measurement, measurement), min_size=1, max_size=30))
def test_lines_are_lines_for_any_positive_data(rows) -> None:
    curves = Curves.guess([1.0, 2.0, 1e12])
    for row in rows:
        curves = curves.observe([b for b, _ in row], [10.0**t for _, t in row])
        for value in (curves.alpha, curves.beta, curves.noise, curves.suspect, *curves.info):
            assert np.all(np.isfinite(value))
        assert np.all(curves.alpha >= 0)
        assert np.all(curves.beta > 0)
        assert np.all(curves.noise > 0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.permutations(range(4)))
def test_workers_are_independent(seed: int, order: list[int]) -> None:
    random = np.random.default_rng(seed)
    here, there = Curves.guess([1.0] * 4), Curves.guess([1.0] * 4)
    for _ in range(8):
        b, t = random.integers(0, 50, 4), random.lognormal(size=4)
        here, there = here.observe(b, t), there.observe(b[order], t[order])
    for name in ("alpha", "beta", "noise", "suspect", "seen"):
        np.testing.assert_array_equal(getattr(here, name)[order], getattr(there, name))


def test_a_batch_of_zero_is_no_measurement() -> None:
    before = fitted(0.05, 0.002, [32, 64])
    after = before.observe([0], [float("nan")])
    assert after.state_dict() == before.state_dict()


def test_observing_changes_nothing_in_place() -> None:
    before = fitted(0.05, 0.002, [32, 64])
    saved = json.dumps(before.state_dict())
    before.observe([16], [3.0])
    assert json.dumps(before.state_dict()) == saved


def test_scaled() -> None:
    before = fitted(0.05, 0.002, [32, 64, 48])
    after = before.scaled([3.0])
    np.testing.assert_allclose(after.times([10, 50])[0], 3 * before.times([10, 50])[0])
    np.testing.assert_allclose(after.alpha_uncertainty([32]), before.alpha_uncertainty([32]))


def test_state_goes_through_json() -> None:
    before = fitted(0.05, 0.002, [32, 64, 48], noise=0.1)
    after = Curves.from_state(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict() == before.state_dict()
    assert after.observe([20], [0.1]).state_dict() == before.observe([20], [0.1]).state_dict()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_bad_timings_are_named(seconds: float) -> None:
    with pytest.raises(InfeasibleError) as caught:
        Curves.guess([1.0, 1.0]).observe([8, 16], [0.1, seconds])
    assert "worker 1" in str(caught.value)
    assert str(seconds) in str(caught.value)
    assert "batch 0" in str(caught.value)


def test_wrong_number_of_measurements() -> None:
    with pytest.raises(InfeasibleError, match="2 workers"):
        Curves.guess([1.0, 1.0]).observe([8], [0.1])
    with pytest.raises(InfeasibleError, match="worker 0"):
        Curves.guess([1.0, 1.0]).observe([-8, 8], [0.1, 0.1])


def several(times, *, noise: float = 0.05, steps: int = 10, seed: int = 0) -> Curves:
    """Workers that need so many seconds for batches of 32, after a few noisy steps."""
    random, curves = np.random.default_rng(seed), Curves.guess(np.ones(len(times)))
    for _ in range(steps):
        curves = curves.observe(np.full(len(times), 32), times * (1 + noise * random.standard_normal(len(times))))
    return curves


def test_workers_that_noise_alone_tells_apart_get_one_line() -> None:
    one = 0
    for seed in range(20):
        curves = several(np.full(4, 0.1), seed=seed)
        times, pooled = curves.times([32] * 4), curves.pooled([32] * 4).times([32] * 4)
        assert times.min() < pooled.mean() < times.max()
        one += np.ptp(pooled) < 1e-3 * np.ptp(times)
    assert one >= 15  # two standard deviations are exceeded now and then


def test_workers_that_differ_keep_their_lines() -> None:
    for seed in range(10):
        curves = several(np.array([0.1, 0.1, 0.15, 0.02]), seed=seed)
        own, pooled = curves.times([32] * 4), curves.pooled([32] * 4).times([32] * 4)
        np.testing.assert_allclose(pooled[2:], own[2:], rtol=1e-9)


def test_a_worker_that_takes_no_part_is_in_no_group() -> None:
    curves = several(np.full(3, 0.1))
    pooled = curves.pooled([48, 48, 0])
    assert pooled.times([32] * 3)[2] == curves.times([32] * 3)[2]


def test_lines_that_cross_between_very_different_batches_are_no_equals() -> None:
    curves = Curves.guess([1.0, 1.0])
    for small, large in [(14, 140), (20, 120)] * 40:
        curves = curves.observe([small, large], [0.2 + 1e-5 * small, 0.1 + 0.0013 * large])
    own, pooled = curves.times([14, 140]), curves.pooled([14, 140]).times([14, 140])
    np.testing.assert_allclose(pooled, own, rtol=1e-9)


def test_a_leap_corrects_the_slope_and_not_the_speed() -> None:
    """Between 12 and 20 samples noise hid that time grows with the batch; 64 show it."""
    curves = Curves.guess([1.0])
    for batch in [16, 12, 20] * 6:
        curves = curves.observe([batch], [0.1])
    assert curves.times([64])[0] < 0.2
    for _ in range(3):
        curves = curves.observe([64], [0.4])
    assert curves.times([64])[0] == pytest.approx(0.4, rel=0.1)
    assert curves.times([16])[0] == pytest.approx(0.1, rel=0.2)
    assert curves.changes[0] == 0


def test_workers_far_apart_are_no_equals_however_little_is_known_of_them() -> None:
    """One of three has just become much faster, and measurements are so noisy that it could be chance."""
    curves, batches = Curves.guess([1.0] * 3), [16] * 3
    for _ in range(40):
        curves = curves.observe(batches, [0.1] * 3)
    curves = replace(curves, noise=np.full(3, 0.15))
    for _ in range(8):
        if not curves.changes[2]:
            curves = curves.observe(batches, [0.1, 0.1, 0.07])
    assert curves.changes.tolist() == [0, 0, 1]
    times = curves.times(batches)
    assert curves.pooled(batches).times(batches)[2] == pytest.approx(times[2], rel=1e-3)


def measured(batches: list[list[int]], alpha: list[float], beta: list[float], noise: float = 0.0) -> Curves:
    """Several workers' lines after steps with these batches, one list per step; 0: not measured."""
    random, curves = np.random.default_rng(3), Curves.guess(np.ones(len(alpha)))
    for step in np.array(batches, dtype=float):
        curves = curves.observe(step, (np.array(alpha) + np.array(beta) * step) * (1 + noise * random.normal()))
    return curves


def test_who_was_measured_at_one_batch_only_is_taken_to_be_like_the_others() -> None:
    """Parked after a few steps with 16 samples. That 64 take four times as long is unlikely: for others they do not."""
    curves = measured([[16, 16]] * 4 + [[64, 0]] * 6 + [[32, 0]] * 4, [0.05, 0.05], [0.0025, 0.0025], noise=0.02)
    assert curves.times([0, 64])[1] > 0.33, "as if it had no fixed part"
    guessed = curves.shaped()
    assert guessed.times([0, 64])[1] == pytest.approx(0.05 + 0.0025 * 64, rel=0.15)
    assert guessed.times([0, 16])[1] == pytest.approx(curves.times([0, 16])[1])
    assert guessed.alpha[0] == curves.alpha[0]
    assert np.array_equal(guessed.info, curves.info), "it is as uncertain as before"


def test_a_slower_one_is_not_given_a_larger_fixed_part_than_others_have() -> None:
    curves = measured([[16, 8]] * 4 + [[64, 0]] * 6 + [[32, 0]] * 4, [0.05, 0.25], [0.0025, 0.0125])
    assert curves.shaped().alpha[1] == pytest.approx(0.05, rel=0.1)


def test_what_nobody_knows_cannot_be_guessed() -> None:
    curves = measured([[16, 16]] * 4, [0.05, 0.05], [0.0025, 0.0025])
    assert curves.shaped() is curves
    assert Curves.guess([1.0, 2.0]).shaped().beta.tolist() == [1.0, 0.5]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([None, 8]))
def test_guesses_about_shapes_keep_what_was_measured(seed: int, micro: int | None) -> None:
    random = np.random.default_rng(seed)
    curves = replace(Curves.guess(np.ones(4)), micro=None if micro is None else np.full(4, micro))
    for _ in range(int(random.integers(1, 12))):
        step = random.integers(0, 3, 4) * random.integers(1, 40, 4)
        curves = curves.observe(step, 0.01 + random.random(4))
    guessed, at = curves.shaped(), np.maximum(curves.at, 1)
    seen = curves.seen > 0
    assert np.all(guessed.alpha >= 0)
    assert np.all(guessed.beta > 0)
    np.testing.assert_allclose(guessed.times(at)[seen], curves.times(at)[seen], rtol=2e-3)
    assert np.array_equal(guessed.alpha[~seen], curves.alpha[~seen])
