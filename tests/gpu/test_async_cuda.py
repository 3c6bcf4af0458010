"""Asynchronous mode on a CUDA device: the server stays on the CPU, the workers' parameters on the card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from omnilearn import OmniLearn
from omnilearn.pytorch.asynchronous.gradient import SWITCH as EARLY
from omnilearn.pytorch.asynchronous.shared import SWITCH
from tests.gang import Gang
from tests.integration.asynchronous import count_epochs, counting, uses
from tests.integration.common import blobs, equal, norm_net, run_epochs, snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def counted() -> Any:
    omni, model, optimizer, loader = counting(120, device="cuda")
    with omni:
        count_epochs(model, optimizer, omni, loader, 3)
        assert model.uses.is_cuda
        return uses(model), omni._worker.version, omni._worker._step


def pinned() -> list[bool]:
    """Whether the memory shared with the server is, before and after this worker has left."""
    omni, *_ = counting(24, device="cuda")
    tensors = omni._worker._tensors
    assert tensors.shared
    before = [tensors._arrived.is_pinned(), tensors._outbox.is_pinned()]
    omni.close()
    torch.ones(1, device="cuda").cpu()
    return [*before, tensors._outbox.is_pinned()]


def trained() -> Any:
    with OmniLearn(24, mode="async", device="cuda") as omni:
        model = norm_net()
        optimizer = torch.optim.Adam(model.to("cuda").parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cuda")
        model, optimizer, scaler = omni.prepare(model, optimizer, scaler)
        for x, y in omni.loader(blobs(96), shuffle=True):
            assert x.is_cuda
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            omni.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        run_epochs(omni, model, optimizer, omni.loader(blobs(96)), epochs=1)
        return [t.cpu() for t in snapshot(model)]


def early_or_not(clip: bool) -> Any:
    with OmniLearn(24, mode="async", lr_scaling="none", device="cuda") as omni:
        torch.manual_seed(2)
        model: Any = nn.Sequential(nn.Linear(8, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400))
        model, optimizer = omni.prepare(model.double(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for x, y in omni.loader(blobs(96), shuffle=True):
            omni.backward(F.cross_entropy(model(x.double()), y))
            if clip:
                omni.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        gradient = omni._worker.gradient
        return [t.cpu() for t in snapshot(model)], gradient.early, bool(gradient._hooks)


@pytest.mark.parametrize("clip", [False, True])
def test_a_gradient_that_leaves_early_is_the_same(gang: Gang, clip: bool) -> None:
    """Equal up to the order of additions on the card; a part that was torn or missed would differ by far more."""
    ((early, left, on),) = gang.run(1, early_or_not, clip, environment={0: {SWITCH: "0", EARLY: "1"}})
    ((late, none, _),) = gang.run(1, early_or_not, clip, environment={0: {SWITCH: "0", EARLY: "0"}})
    for a, b in zip(early, late, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert none == 0
    assert left == (3 if clip else 12), "three buckets, in every one of four steps; with clipping, in the first"
    assert on != clip


def test_every_sample_once_on_a_card(gang: Gang) -> None:
    results = gang.run(2, counted)
    for counts, version, _ in results:
        assert counts == [3.0] * 120
        assert version == sum(steps for _, _, steps in results)


def test_what_is_shared_with_the_server_is_pinned(gang: Gang) -> None:
    assert gang.run(2, pinned) == [[True, True, False]] * 2


def test_fused_adam_and_mixed_precision(gang: Gang) -> None:
    states = gang.run(2, trained)
    assert equal(*states)
    assert all(torch.isfinite(t).all() for t in states[0] if t.is_floating_point())
