"""Gradients in fewer bits: half the bytes, the same result on all ranks, near the exact one. And odd memory layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from omnilearn import OmniLearn
from omnilearn.errors import InfeasibleError
from tests.gang import Gang
from tests.integration.common import Script, blobs, mlp, snapshot

PLANS = [[12, 6, 6], [3, 9, 12], [20, 0, 4], [8, 8, 8]]
STEPS = 12
BF16 = 2**-8
"""The relative step of bfloat16: every rounding is off by at most half of it."""


def train(compress: str | None, by_weight: bool) -> Any:
    """The update that some steps made, and what was sent in each: (type, elements)."""
    sent: list[list[tuple[torch.dtype, int]]] = []
    all_reduce = dist.all_reduce

    def watched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if sent and tensor.is_floating_point() and tensor.dtype != torch.float64:  # the weights' sum is of float64
            sent[-1].append((tensor.dtype, tensor.numel()))
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = watched
    try:
        with OmniLearn(24, policy=Script(PLANS), seed=3, compress=compress) as omni:
            model = mlp()
            first = snapshot(model)
            model, optimizer = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
            for x, y in omni.loader(blobs(24 * STEPS), shuffle=True):
                sent.append([])
                omni.backward(F.cross_entropy(model(x), y), weight=float(2 * len(x)) if by_weight else None)
                optimizer.step()
                optimizer.zero_grad()
            takes_part = [piece for piece in sent if piece]
            update = [after.cpu() - before for after, before in zip(snapshot(model), first, strict=True)]
            return torch.cat([part.reshape(-1) for part in update]), takes_part
    finally:
        dist.all_reduce = all_reduce


@pytest.mark.parametrize("by_weight", [False, True])
def test_half_the_bytes_and_nearly_the_same_result(gang: Gang, by_weight: bool) -> None:
    parameters = sum(p.numel() for p in mlp().parameters())
    exact = gang.run(3, train, None, by_weight)[0][0]
    results = gang.run(3, train, "bf16", by_weight)
    for update, sent in results:
        assert torch.equal(update, results[0][0]), "bit for bit the same on all ranks"
        for step in sent:  # the first one is reduced by hand, the others by DistributedDataParallel
            assert {kind for kind, _ in step} == {torch.bfloat16}
            assert sum(count for _, count in step) == parameters
    error = torch.linalg.norm(results[0][0] - exact) / torch.linalg.norm(exact)
    assert 0 < error < 3 * BF16


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="unknown compression 'fp8': use 'bf16' or None"):
        OmniLearn(8, compress="fp8")
    with pytest.raises(InfeasibleError, match=r"compress='bf16' is for mode='sync'"):
        OmniLearn(8, compress="bf16", mode="async")


def conv_net(compiled: bool, channels_last: bool, compress: str | None) -> Any:
    import torch._dynamo

    torch._dynamo.reset()
    torch.manual_seed(2)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model: Any = nn.Sequential(*layers, nn.Linear(4, 2))
    x = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    data = torch.utils.data.TensorDataset(x, (x.mean(dim=(1, 2, 3)) > 0).long())
    layout = torch.channels_last if channels_last else torch.contiguous_format
    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # on a card
    with exact, OmniLearn(16, policy=Script([[12, 4], [4, 12], [8, 8]]), compress=compress) as omni:
        model = model.to(memory_format=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if compiled:
            model = torch.compile(model, backend="aot_eager")
        model, optimizer = omni.prepare(model, optimizer)
        for _ in range(2):
            for x, y in omni.loader(data, shuffle=True):
                omni.backward(F.cross_entropy(model(x.to(memory_format=layout)), y))
                optimizer.step()
                optimizer.zero_grad()
        kept = all(p.is_contiguous(memory_format=layout) for p in model.parameters() if p.dim() == 4)
        return kept, [p.detach().cpu().contiguous().clone() for p in model.parameters()]


@pytest.mark.parametrize("compress", [None, "bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_channels_last_and_compiled(gang: Gang, compiled: bool, compress: str | None) -> None:
    plain = gang.run(2, conv_net, False, False, None)[0][1]
    for kept, parameters in gang.run(2, conv_net, compiled, True, compress):
        assert kept, "the layout is as the user chose it"
        for mine, theirs in zip(parameters, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 if compress is None else 0.02)
