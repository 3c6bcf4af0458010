"""What holds only on a CUDA device. Skipped where there is none; results are recorded in docs/results/."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from omnilearn import OmniLearn
from omnilearn.data import Sampler
from tests.gang import Gang
from tests.integration.test_exact import CHANGING, Data, Script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

STEPS, WARM_UP = 8, 4
BLOCKING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMemcpy")
# (cudaEventSynchronize is called on events of some steps before, which are over: it does not block.)


def _data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32 * (STEPS + WARM_UP), 64, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))


def _profiled(steps: Any) -> collections.Counter[str]:
    """Blocking CUDA calls per kind while the rest of ``steps`` is taken, after the warm-up."""
    for _ in range(WARM_UP):
        next(steps)
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as p:
        for _ in steps:
            pass
    names = collections.Counter({event.key: event.count for event in p.key_averages()})
    return collections.Counter({name: names[name] for name in BLOCKING if names[name]})


def plain() -> collections.Counter[str]:
    """An ordinary single-process loop."""
    model = _model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(_data(), batch_size=32, pin_memory=True)

    def steps() -> Any:
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield

    return _profiled(steps())


def ours() -> collections.Counter[str]:
    with OmniLearn(32) as omni:
        model = _model()
        model, optimizer = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        loader = omni.loader(_data())

        def steps() -> Any:
            for x, y in loader:
                omni.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                yield

        return _profiled(steps())


def test_no_synchronisation_is_added_per_step(gang: Gang) -> None:
    """One process each: what OmniLearn adds to a step does not make the host wait for the device."""
    (before,), (after,) = gang.run(1, plain), gang.run(1, ours)
    added = sum(after.values()) - sum(before.values())
    assert added < STEPS, f"per step, plain: {before}, OmniLearn: {after}"


def test_ranks_that_share_a_card_use_gloo(gang: Gang) -> None:
    def_backend = gang.run(2, backend)
    assert def_backend == [("gloo", "cuda")] * 2


def backend() -> tuple[str, str]:
    with OmniLearn(8) as omni:
        return omni._world.backend, omni.device.type


def _normed(kind: Any) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), kind(16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()


def synchronised() -> list[torch.Tensor]:
    with OmniLearn(16, policy=Script(CHANGING), seed=11) as omni:
        model = _normed(torch.nn.SyncBatchNorm)
        model, optimizer = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        loader = omni.loader(Data(), shuffle=True)
        for _ in range(3):
            for x, y, _tokens in loader:
                omni.backward((model(x) - y).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().cpu().clone() for p in model.parameters()]


def test_sync_batch_norm_equals_one_process(gang: Gang) -> None:
    """With SyncBatchNorm (CUDA only in torch) even normalisation is that of the whole global batch."""
    model, data, sampler = _normed(torch.nn.BatchNorm1d), Data(), Sampler(len(Data()), [16], seed=11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        for share in sampler.shares(0):
            (model(data.x[share.indices]) - data.y[share.indices]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sampler.next_epoch()
    for parameters in gang.run(3, synchronised):
        for mine, theirs in zip(model.parameters(), parameters, strict=True):
            assert torch.linalg.norm(mine - theirs) <= 1e-9 * torch.linalg.norm(mine)
