"""A gradient that leaves during the backward pass: whatever user code does, the server has the right one at a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from omnilearn.errors import UsageError
from omnilearn.pytorch.asynchronous import wire
from omnilearn.pytorch.asynchronous.gradient import SWITCH, TRIES, Gradient
from omnilearn.pytorch.asynchronous.layout import Layout

CPU = torch.device("cpu")


class Journey:
    """A model, its gradient, and a server that has receives posted for each bucket once between two steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shared: bool = False, switch: str = "1") -> None:
        monkeypatch.setattr(wire, "BUCKET", 256)
        monkeypatch.setenv(SWITCH, switch)
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        self.parameters = list(self.model.parameters())
        self.layout = Layout(self.parameters)
        flat = self.layout.empty()
        self.inbox = flat if shared else self.layout.empty()
        self.came: list[int] = []
        self.gradient = Gradient(self.parameters, self.layout, flat, CPU, None if shared else self._receive)

    def _receive(self, number: int, bucket: torch.Tensor) -> None:
        assert number not in self.came, "the server waits for each bucket once"
        self.came.append(number)
        begin, end, _ = self.layout.buckets(wire.BUCKET)[number]
        self.inbox[begin:end] = bucket

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(4, 8)).square().mean()

    def backward(self, loss: torch.Tensor | None = None) -> None:
        with self.gradient.final():
            (self.loss() if loss is None else loss).backward()

    def step(self) -> None:
        """What the server has then is the gradient."""
        present, again = self.gradient.collect()
        if again:
            self.inbox.copy_(again[0])
        self.came.clear()
        assert present == [p.grad is not None for p in self.parameters]
        expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        assert torch.equal(self.inbox, self.layout.pack(expected))
        self.model.zero_grad()


@pytest.fixture
def journey(monkeypatch: pytest.MonkeyPatch) -> Journey:
    return Journey(monkeypatch)


def test_every_bucket_leaves_while_gradients_arrive(journey: Journey) -> None:
    seen: list[int] = []
    journey.parameters[1].register_post_accumulate_grad_hook(lambda _: seen.append(len(journey.came)))
    buckets = len(journey.layout.buckets(wire.BUCKET))
    for step in range(1, 4):
        journey.backward()
        assert sorted(journey.came) == list(range(buckets))
        assert seen[-1] >= buckets - 2, "the last layers' left before the first layer's arrived"
        journey.step()
        assert journey.gradient.early == step * buckets


def clip(j: Journey) -> None:
    nn.utils.clip_grad_norm_(j.parameters, 1e-3)


def behind_its_back(j: Journey) -> None:
    j.parameters[3].grad.data.mul_(0.5)  # type: ignore[union-attr]


def exchange(j: Journey) -> None:
    j.parameters[3].grad = torch.full_like(j.parameters[3], 7.0)


def unscale(j: Journey) -> None:
    grads = [p.grad for p in j.parameters if p.grad is not None]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.full((1,), 0.5))


CHANGES: list[Callable[[Journey], None]] = [
    clip, behind_its_back, exchange, unscale,
    lambda j: j.backward(),  # accumulated over two batches
    lambda j: (j.model.zero_grad(), j.backward())[0],  # a step that was left out
    lambda j: j.model.zero_grad(),
    lambda j: setattr(j.parameters[0], "grad", None),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_gradient_is_sent_again_and_never_early_after_that(
    journey: Journey, change: Callable[[Journey], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "omnilearn")
    journey.backward()
    journey.step()
    before = journey.gradient.early
    assert before > 0
    assert not caplog.records
    journey.backward()
    change(journey)
    journey.step()
    assert "gradients change between backward and step" in caplog.text
    early = journey.gradient.early
    journey.backward()
    assert not journey.came
    change(journey)
    journey.step()
    assert journey.gradient.early == early


def test_what_is_the_same_is_not_sent_again(journey: Journey, caplog: pytest.LogCaptureFixture) -> None:
    """Also where it is not a number, was touched and set back, or lies in memory in another way."""
    caplog.set_level(logging.DEBUG, "omnilearn")
    journey.backward(journey.loss() * float("nan"))
    journey.gradient.collect()
    journey.came.clear()
    journey.model.zero_grad()
    journey.backward()
    nn.utils.clip_grad_norm_(journey.parameters, 1e9)
    weight = journey.parameters[2]
    assert weight.grad is not None
    weight.grad = weight.grad.t().contiguous().t()
    journey.step()
    assert not caplog.records


def test_parameters_used_twice_once_or_not_at_all(journey: Journey) -> None:
    for used in ((0, 1, 0), (3,), (5, 4), (0, 1, 2, 3, 4, 5)):
        x = torch.randn(4, 8)
        for i in used:
            x = journey.model[i](x)
        journey.backward(x.sum())
        journey.step()
    assert journey.gradient.early > 0


def test_a_pass_that_computes_its_segments_again(journey: Journey) -> None:
    """Reentrant checkpoints accumulate a gradient several times in one backward pass."""
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        for i in (0, 1, 0, 1):
            x = checkpoint(journey.model[i], x, use_reentrant=True)
        journey.backward(x.sum())
        journey.step()


def test_an_error_in_the_backward_pass(journey: Journey) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("in user code")

    hook = journey.parameters[4].register_hook(fail)
    with suppress(ArithmeticError):
        journey.backward()
    assert journey.came, "some of it had left"
    hook.remove()
    journey.model.zero_grad()
    journey.backward()
    journey.step()
    journey.backward()
    journey.step()


def test_outside_of_the_last_pass_nothing_leaves(journey: Journey) -> None:
    for _ in range(2):
        journey.loss().backward()
        assert not journey.came
        journey.backward()
        assert journey.came
        journey.step()


def test_sparse_gradients_are_refused_at_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BUCKET", 256)
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 8))
    parameters = list(model.parameters())
    layout = Layout(parameters)
    gradient = Gradient(parameters, layout, layout.empty(), CPU, lambda number, bucket: None)
    with gradient.final():
        model(torch.arange(4)).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        gradient.collect()


@pytest.mark.parametrize("how", ["shared", "switched off", "stopped"])
def test_where_nothing_is_to_leave_early(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    journey = Journey(monkeypatch, shared=how == "shared", switch="0" if how == "switched off" else "1")
    if how == "stopped":
        journey.gradient.stop("a test")
    for change in (lambda j: None, clip):
        journey.backward()
        change(journey)
        journey.step()
    assert journey.gradient.early == 0


@pytest.mark.parametrize("faster", [True, False])
def test_it_is_tried_in_every_other_step_and_kept_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    journey = Journey(monkeypatch, switch="")
    early = []
    for _ in range(2 * TRIES + 3):
        before = journey.gradient.early
        journey.backward()
        early.append(journey.gradient.early > before)
        journey.step()
        journey.gradient.took(1.0 if early[-1] == faster else 1.1)
    assert early == [True, False] * TRIES + [faster] * 3


def test_buckets_cover_everything_once() -> None:
    tensors = [torch.zeros(n, dtype=kind) for n in (3, 0, 500, 1, 70, 0) for kind in (torch.float32, torch.float64)]
    layout = Layout(tensors)
    for size in (1, 64, 1000, 10**6):
        buckets = layout.buckets(size)
        assert [bucket.begin for bucket in buckets] == [0, *(bucket.end for bucket in buckets[:-1])]
        assert buckets[-1].end == layout.size
        assert all(bucket.end - bucket.begin >= size for bucket in buckets[:-1])
        assert sorted(i for bucket in buckets for i in bucket.members) == list(range(len(tensors)))
        for bucket in buckets:
            flat = layout.empty()
            flat[bucket.begin : bucket.end] = 1
            touched = [i for i, view in enumerate(layout.views(flat)) if view.numel() and view.view(torch.uint8).any()]
            assert touched == [i for i in sorted(bucket.members) if tensors[i].numel()]
