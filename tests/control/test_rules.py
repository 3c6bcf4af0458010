"""The learning rate follows the batch by a rule, a stale gradient is judged by another."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnilearn.control import LR_RULES, STALENESS_RULES, judge_staleness, lr_factor
from omnilearn.errors import InfeasibleError


@given(st.sampled_from(LR_RULES), st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_learning_rate_rules(rule: str, batch: float, reference: float) -> None:
    factor = lr_factor(rule, batch, reference)
    power = {"capped": 1.0 if batch < reference else 0.0, "linear": 1.0, "sqrt": 0.5, "none": 0.0}[rule]
    assert math.isclose(factor, (batch / reference) ** power, rel_tol=1e-12)
    assert lr_factor(rule, reference, reference) == 1.0


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_the_capped_rate_grows_with_the_batch_and_is_never_more_than_was_chosen(a: float, b: float, c: float) -> None:
    small, large = sorted((a, b))
    assert lr_factor("capped", small, c) <= lr_factor("capped", large, c) <= 1.0
    assert lr_factor("capped", a, c) <= lr_factor("linear", a, c)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_staleness_rules(staleness: int, lead: int, threshold: int) -> None:
    def judge(rule: str) -> tuple[float, bool]:
        verdict = judge_staleness(rule, staleness, lead, threshold)
        return verdict.weight, verdict.wait

    assert judge("apply") == (1.0, False)
    assert judge("scale") == (1 / (1 + staleness), False)
    assert judge("discard") == (1.0 if staleness <= threshold else 0.0, False)
    assert judge("bounded") == (1.0, lead > threshold)


@pytest.mark.parametrize("rule", STALENESS_RULES)
def test_a_fresh_gradient_of_a_worker_that_is_not_ahead_is_applied_in_full(rule: str) -> None:
    verdict = judge_staleness(rule, 0)
    assert (verdict.weight, verdict.wait) == (1.0, False)


def test_wrong_values_are_named() -> None:
    with pytest.raises(InfeasibleError, match=r"'cubic'.*linear, capped, sqrt, none"):
        lr_factor("cubic", 1, 1)
    with pytest.raises(InfeasibleError, match=r"positive batches, got 0 and reference 8"):
        lr_factor("linear", 0, 8)
    with pytest.raises(InfeasibleError, match="nan"):
        lr_factor("sqrt", float("nan"), 8)
    with pytest.raises(InfeasibleError, match=r"'drop'.*apply, scale, discard, bounded"):
        judge_staleness("drop", 1)
    with pytest.raises(InfeasibleError, match="-1"):
        judge_staleness("apply", -1)
