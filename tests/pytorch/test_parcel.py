"""A state is what it was when it was packed, whatever its tensors look like."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from omnilearn.pytorch.parcel import pack, unpack

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
LOOKS = {
    "plain": lambda t: t,
    "turned": lambda t: t.t() if t.dim() == 2 else t,
    "every other": lambda t: t[::2] if t.dim() else t,
    "expanded": lambda t: t.unsqueeze(-1).expand(*t.shape, 3),
    "parameter": lambda t: nn.Parameter(t, requires_grad=False),
}


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    kind, seed = draw(st.sampled_from(KINDS)), draw(st.integers(0, 9))
    values = 100 * torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return LOOKS[draw(st.sampled_from(sorted(LOOKS)))](values.to(kind))


STATES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | tensors(),
    lambda inside: (
        st.lists(inside, max_size=4)
        | st.tuples(inside, inside)
        | st.dictionaries(st.text(max_size=3), inside, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        alike = theirs.dtype == ours.dtype and theirs.shape == ours.shape
        return alike and theirs.stride() == torch.empty_like(ours).stride() and torch.equal(ours.detach(), theirs)
    if isinstance(ours, dict):
        return type(ours) is type(theirs) and list(ours) == list(theirs) and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, (list, tuple)):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


@settings(max_examples=200, deadline=None)
@given(STATES)
def test_what_was_packed_comes_out(state: Any) -> None:
    assert same(state, unpack(pack(state)))


def test_a_parcel_is_a_copy_and_so_is_what_comes_out() -> None:
    weights = torch.ones(3)
    parcel = pack({"weights": weights})
    weights += 1
    first = unpack(parcel)["weights"]
    assert first.tolist() == [1, 1, 1]
    first += 1
    assert unpack(parcel)["weights"].tolist() == [1, 1, 1]
    assert first.untyped_storage().nbytes() == first.nbytes, "it does not keep the parcel"


def test_tied_weights_travel_once() -> None:
    model = nn.Sequential(nn.Embedding(50, 40), nn.Linear(40, 50, bias=False))
    model[1].weight = model[0].weight
    parcel = pack(model.state_dict())
    assert 4 * 50 * 40 < len(parcel) < 1.5 * 4 * 50 * 40
    state = unpack(parcel)
    assert torch.equal(state["0.weight"], model[0].weight)
    assert state["1.weight"] is state["0.weight"]


def test_what_modules_and_optimizers_say_beside_their_tensors_is_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    state = unpack(pack({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    assert state["model"]._metadata == model.state_dict()._metadata
    assert state["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    moments = state["optimizer"]["state"][0]["exp_avg"]
    assert moments.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moments, optimizer.state[model[0].weight]["exp_avg"])


def test_a_number_and_its_conjugate_are_two() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    assert same([numbers, numbers.conj()], unpack(pack([numbers, numbers.conj()])))


def test_other_kinds_of_tensors_are_pickled() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(unpack(pack([sparse]))[0].to_dense(), torch.eye(3))
