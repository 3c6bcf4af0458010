"""The pure parts of asynchronous mode: what travels, where tensors lie, how plans follow timings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from omnilearn import control
from omnilearn.cluster.resources import Resources
from omnilearn.control import Problem
from omnilearn.engine.planning import Planning
from omnilearn.errors import InfeasibleError, UsageError
from omnilearn.pytorch.asynchronous import shared, wire
from omnilearn.pytorch.asynchronous.layout import Layout, all_finite
from omnilearn.pytorch.asynchronous.owner import Owner
from omnilearn.pytorch.asynchronous.stretch import counting_as

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@given(plain)
def test_values_survive_the_journey(value: object) -> None:
    assert wire.decode(wire.encode(value)) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_survive_the_journey(dtype: torch.dtype) -> None:
    value = {"a": [torch.ones(2, 3).to(dtype), torch.zeros(0).to(dtype)], 3: torch.tensor(1).to(dtype)}
    back = wire.decode(wire.encode(value))
    for ours, theirs in zip([*value["a"], value[3]], [*back["a"], back[3]], strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    """Random bytes, and a good message with its bytes changed."""
    good = bytearray(wire.encode({"tensor": torch.ones(3), "deep": [1, {"x": (2.0, None)}]}).numpy().tobytes())
    spoilt = bytes(a ^ b for a, b in zip(good, noise.ljust(len(good), b"\0"), strict=False))
    for raw in (noise, spoilt):
        with contextlib.suppress(wire.Nonsense):
            wire.decode(torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte())


def test_pickles_are_not_looked_at() -> None:
    import pickle

    raw = bytearray(pickle.dumps(print))
    with pytest.raises(wire.Nonsense):
        wire.decode(torch.frombuffer(raw, dtype=torch.uint8))
    with pytest.raises(UsageError, match="cannot be sent"):
        wire.encode({"a": object()})


def test_a_header_keeps_what_it_is_given() -> None:
    header = wire.Header(wire.PUSH, version=2**40, seconds=1.5)
    header.ranges, header.learning_rates = [(3, 9), (20, 24)], [0.1, 1e-9]
    header.scheduled[2] = 0.5, 1, math.nan
    assert (header["version"], header["seconds"], header["leases"]) == (2**40, 1.5, 2)
    assert header.ranges == [(3, 9), (20, 24)]
    assert header.learning_rates == [0.1, 1e-9]
    assert header.scheduled[2, :2].tolist() == [0.5, 1.0]
    header.check([wire.PUSH])


@pytest.mark.parametrize(
    ("field", "value"),
    [("magic", 7), ("protocol", 99), ("kind", 50), ("leases", 17), ("leases", -1), ("rates", 99), ("note", 2**40)],
)
def test_a_bad_header_is_refused(field: str, value: int) -> None:
    header = wire.Header(wire.PUSH)
    header[field] = value
    with pytest.raises(wire.Nonsense):
        header.check([wire.PUSH])


def test_a_layout_is_one_stretch_per_type() -> None:
    tensors = [torch.randn(3, 2), torch.arange(5), torch.randn(()), torch.randn(0), torch.randn(7).double()]
    layout = Layout(tensors)
    flat = layout.pack(tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, layout.views(flat), strict=True))
    assert len(layout.stretches(flat)) == 3
    assert all_finite(layout.stretches(flat))
    layout.views(flat)[2].fill_(math.inf)
    assert not all_finite(layout.stretches(flat))


def test_large_numbers_are_finite() -> None:
    assert all_finite([torch.full((10,), 3e38)])
    assert not all_finite([torch.tensor([math.inf, -math.inf])])
    assert all_finite([torch.full((70_000,), 1.0).half(), torch.arange(3)])


def test_the_owner_scales_the_learning_rate_and_restores_it() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    owner = Owner(model, optimizer, [])
    owner.apply([torch.ones(1, 1).double()], [1], 0.25)
    assert model.weight.item() == -0.125
    assert (owner.learning_rates, owner.version) == ([0.5], 1)
    owner.apply([torch.ones(1, 1).double()], [0], 1.0)
    assert model.weight.item() == -0.125, "no gradient, no change"


def stepped(make: Any, counts: Sequence[float]) -> tuple[torch.Tensor, dict[str, Any]]:
    """A parameter and its optimizer's state after a step with one gradient, then steps with another that count so."""
    parameter = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = make([parameter])
    options = dict(optimizer.param_groups[0])
    for gradient, count in zip([[1.0, 2.0, 3.0]] + [[3.0, -2.0, 1.0]] * len(counts), [1.0, *counts], strict=True):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        with counting_as(optimizer, count):
            optimizer.step()
    assert optimizer.param_groups[0] == options, "the user's options are back"
    return parameter.detach(), optimizer.state[parameter]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["momentum", "dampening", "adam", "adamw"])
def test_one_step_that_counts_as_three_remembers_as_much_as_three(kind: str, fused: bool) -> None:
    make = {
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=fused),
        "dampening": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, fused=fused),
        "adam": partial(torch.optim.Adam, lr=0.1, fused=fused),
        "adamw": partial(torch.optim.AdamW, lr=0.1, fused=fused),
    }[kind]
    _, three = stepped(make, [1.0, 1.0, 1.0])
    for counts in ([3.0], [0.5, 2.5], [0.25] * 12):
        _, stretched = stepped(make, counts)
        assert stretched.keys() == three.keys()
        for key, value in three.items():
            torch.testing.assert_close(stretched[key], value, rtol=1e-6, atol=1e-9)


def test_without_momentum_a_step_that_counts_as_three_goes_as_far_as_three() -> None:
    make = partial(torch.optim.SGD, lr=0.1)
    torch.testing.assert_close(stepped(make, [3.0])[0], stepped(make, [1.0, 1.0, 1.0])[0])


@pytest.mark.parametrize("fused", [None, False, True])
def test_how_an_optimizer_is_run_stays_the_users_choice(fused: bool | None) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5, fused=fused)
    owner = Owner(model, optimizer, [])
    assert optimizer.param_groups[0]["fused"] is (fused is not False)
    owner.apply([torch.ones(1, 2), torch.ones(1)], [1, 1], 1.0)
    saved = owner.pack()
    assert saved["optimizer"]["param_groups"][0]["fused"] is fused
    owner.unpack(saved)
    owner.apply([torch.ones(1, 2), torch.ones(1)], [1, 1], 1.0)


def cpu(cores: float) -> Resources:
    return Resources("here", cores, "cpu", "", "", 1)


def problem(speeds: Sequence[float]) -> Problem:
    return Problem.of(64, speeds=speeds, minimum=2, park=False)


def test_plans_follow_the_timings_of_workers_at_different_paces() -> None:
    planning = Planning(control.policy("optimal"), problem)
    planning.roster({0: cpu(1), 3: cpu(1)})
    assert planning.plan.batches == (32, 32)
    for step in range(60):
        planning.record(0, planning.batch(0), 0.01 + 0.001 * planning.batch(0))
        if step % 3 == 0:
            planning.record(3, planning.batch(3), 0.01 + 0.004 * planning.batch(3))
    fast, slow = planning.batch(0), planning.batch(3)
    assert fast + slow == 64
    assert abs((0.01 + 0.001 * fast) / (0.01 + 0.004 * slow) - 1) < 0.2, "equal step times"
    assert planning.by_rank.batches == (fast, 0, 0, slow)


def test_a_newcomer_is_planned_for_by_what_the_others_really_do() -> None:
    planning = Planning(control.policy("static"), problem)
    planning.roster({0: cpu(1)})
    planning.record(0, 64, 0.1)
    planning.roster({0: cpu(1), 1: cpu(3)})
    assert planning.plan.batches == (16, 48)
    assert planning.mean_share == 32
    with pytest.raises(InfeasibleError):
        planning.roster({rank: cpu(1) for rank in range(40)})
    assert planning.plan.batches == (16, 48), "nothing changes where it cannot be"


# Shared memory


def test_both_sides_see_the_same_memory() -> None:
    offer = shared.offer("127.0.0.1:1", 100)
    assert offer is not None
    theirs = shared.accept(offer.words, 100)
    offer.close()
    assert theirs is not None
    theirs[7] = 3
    assert offer.memory[7] == 3
    assert (len(theirs), len(offer.memory)) == (100, 100)


def test_memory_that_is_not_what_was_said_is_left_alone() -> None:
    offer = shared.offer("127.0.0.1:1", 100)
    assert offer is not None
    with open("/dev/null") as other:
        for words, size in (
            (offer.words, 99),
            ({**offer.words, "secret": "00" * 64}, 100),
            ({**offer.words, "descriptor": other.fileno()}, 100),
            ({**offer.words, "process": 2**30}, 100),
            ({**offer.words, "descriptor": "../../etc/passwd"}, 100),
            ({}, 100),
            (None, 100),
        ):
            assert shared.accept(words, size) is None
    offer.close()


def test_no_memory_is_offered_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "local_address", lambda endpoint: "10.0.0.1")
    assert shared.offer("10.0.0.2:1", 100) is None
    monkeypatch.undo()
    monkeypatch.setenv(shared.SWITCH, "0")
    assert shared.offer("127.0.0.1:1", 100) is None


def test_steps_of_milliseconds_are_thought_about_together() -> None:
    """Each of them is much noise: two equal workers must not end with 63 and 1."""
    planning, random = Planning(control.policy("optimal"), problem), np.random.default_rng(0)
    planning.roster({0: cpu(1), 1: cpu(1)})
    updates = mock.Mock(side_effect=planning._policy.update)
    with mock.patch.object(type(planning._policy), "update", lambda _, *args: updates(*args)):
        for _ in range(300):
            for rank in (0, 1):
                blip = 4.0 if random.random() < 0.05 else 1.0
                planning.record(rank, planning.batch(rank), (0.003 + 1e-6 * planning.batch(rank)) * blip)
    assert updates.call_count == pytest.approx(300 * 0.0035 / 0.2, abs=2)
    assert min(planning.plan.batches) >= 24
