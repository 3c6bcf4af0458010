"""On a card: batches copied beside the computing, compressed gradients, layouts, NCCL as far as one card goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from omnilearn import OmniLearn
from omnilearn.pytorch.loader import side_stream, to_device
from omnilearn.pytorch.reducer import Reducer
from omnilearn.pytorch.world import World
from tests.gang import Gang
from tests.integration import test_compress
from tests.integration.common import blobs, mlp, run_epochs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

LONG = 4 * 10**9
"""Cycles: some seconds."""


def within(seconds: float, true: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.001)
    return False


def test_a_batch_is_copied_while_the_card_computes() -> None:
    device = torch.device("cuda", 0)
    batch = {"x": torch.arange(2.0**20).pin_memory(), "name": "a", "y": [torch.ones(4).pin_memory()]}
    to_device(batch, device)  # streams and memory are there
    torch.cuda.synchronize()
    current = torch.cuda.current_stream(device)
    torch.cuda._sleep(LONG)
    moved = to_device(batch, device)
    assert not current.query(), "the host did not wait for the card"
    assert within(30, side_stream(device).query)
    assert not current.query(), "the copy was done before the work that was there first"
    total = moved["x"].sum() + moved["y"][0].sum()  # on the current stream, behind both
    assert float(total) == pytest.approx(float(batch["x"].sum()) + 4, rel=1e-6)
    assert moved["name"] == "a"


def test_a_batch_stays_whole_until_it_is_used() -> None:
    """Its memory is not given to the next batch while the card has yet to read it."""
    device = torch.device("cuda", 0)
    torch.cuda._sleep(LONG // 10)
    sums = []
    for value in range(8):
        moved = to_device(torch.full((2**18,), float(value)).pin_memory(), device)
        sums.append(moved.sum())
        del moved
    assert [float(total) / 2**18 for total in sums] == list(range(8))


@pytest.mark.parametrize("by_weight", [False, True])
def test_compressed_gradients(gang: Gang, by_weight: bool) -> None:
    test_compress.test_half_the_bytes_and_nearly_the_same_result(gang, by_weight)


@pytest.mark.parametrize("compress", [None, "bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_channels_last_and_compiled(gang: Gang, compiled: bool, compress: str | None) -> None:
    test_compress.test_channels_last_and_compiled(gang, compiled, compress)


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """All of NCCL that one card allows: a world of one."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_compression_over_nccl(nccl: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64).cuda()
    x = torch.randn(8, 64, device="cuda")
    model(x).square().mean().backward()
    exact = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    world = World(None, timedelta(seconds=60))
    reducer, place = Reducer(world, model, nccl, None, (0,), False, torch.bfloat16), world.place("reducing gradients")
    reducer.arm(model(x).square().mean(), place, 8.0, False).backward()
    assert reducer.finish(place).tolist() == [8.0, 0.0, 0.0]
    world.close()
    for p, before in zip(model.parameters(), exact, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, before.bfloat16().float())


def test_training_where_the_user_has_set_up_nccl(nccl: dist.ProcessGroup) -> None:
    with OmniLearn(24) as omni:
        model = mlp()
        model, optimizer = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert omni.device.type == "cuda"
        assert omni._world.backend == "nccl"
        run_epochs(omni, model, optimizer, omni.loader(blobs(96), shuffle=True), epochs=2)
        assert omni.plan.batches == (24,)
    assert dist.is_initialized(), "what the user set up is the user's to end"
