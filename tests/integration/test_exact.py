"""Whatever the split, a step is the one a single machine would take on the whole global batch: float64, to 1e-12."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from omnilearn import OmniLearn
from tests.gang import Gang
from tests.script import Script

SIZE, FEATURES = 53, 6


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SIZE, FEATURES, generator=generator, dtype=torch.float64)
        self.y = self.x @ torch.randn(FEATURES, 2, generator=generator, dtype=torch.float64)
        self.tokens = torch.randint(1, 9, (SIZE,), generator=generator)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i], self.tokens[i]


def build(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    kinds: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    }
    return model, kinds[optimizer](model.parameters())


def losses(
    model: Any, x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor, by_token: bool
) -> tuple[torch.Tensor, Any]:
    per_sample = (model(x) - y).pow(2).mean(dim=1)
    if by_token:
        return (per_sample * tokens).sum() / tokens.sum(), tokens.sum()
    return per_sample.mean(), None


def alone(optimizer: str, epochs: int, batch: int, by_token: bool, clip: float | None) -> list[torch.Tensor]:
    """One process, plain PyTorch, on the same samples in the same order."""
    from omnilearn.data import Sampler

    model, opt = build(optimizer)
    data, sampler = Data(), Sampler(SIZE, [batch], seed=11)
    for _ in range(epochs):
        for share in sampler.shares(0):
            x, y, tokens = data.x[share.indices], data.y[share.indices], data.tokens[share.indices]
            loss, _ = losses(model, x, y, tokens, by_token)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
        sampler.next_epoch()
    return [p.detach().clone() for p in model.parameters()]


def together(
    plans: list[list[int]],
    optimizer: str,
    epochs: int,
    by_token: bool,
    clip: float | None,
    micro: int | None,
    workers: int,
) -> Any:
    torch.set_default_dtype(torch.float32)
    with OmniLearn(sum(plans[0]), policy=Script(plans), seed=11, micro_batch=micro) as omni:
        model, opt = omni.prepare(*build(optimizer))
        seen, sizes = [], []
        loader = omni.loader(Data(), shuffle=True, num_workers=workers)
        for _ in range(epochs):
            for x, y, tokens in loader:
                loss, weight = losses(model, x, y, tokens, by_token)
                omni.backward(loss, weight=weight)
                if clip:
                    omni.clip_grad_norm_(clip)
                opt.step()
                opt.zero_grad()
                seen.append(len(x))
                sizes.append(omni._engine.piece.share.sizes)
        return [p.detach().cpu().clone() for p in model.parameters()], seen, sizes


def check(gang: Gang, plans: list[list[int]], optimizer: str = "sgd", *, epochs: int = 3, by_token: bool = False,
          clip: float | None = None, micro: int | None = None, workers: int = 0) -> Any:  # fmt: skip
    expected = alone(optimizer, epochs, sum(plans[0]), by_token, clip)
    results = gang.run(len(plans[0]), together, plans, optimizer, epochs, by_token, clip, micro, workers)
    for parameters, _, _ in results:
        for mine, theirs in zip(expected, parameters, strict=True):
            assert torch.linalg.norm(mine - theirs) <= 1e-12 * torch.linalg.norm(mine)
    assert sum(sum(seen) for _, seen, _ in results) == epochs * SIZE, "every sample once per epoch"
    return results


CHANGING = [[8, 4, 4], [4, 8, 4], [1, 2, 13], [10, 5, 1], [5, 5, 6]]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_changing_batches_and_the_tail(gang: Gang, optimizer: str) -> None:
    results = check(gang, CHANGING, optimizer)
    assert len(set(results[0][2])) >= 4, "the plans really changed"


@pytest.mark.parametrize("plans", [[[5, 11]], [[9, 3, 2, 2], [1, 1, 1, 13], [4, 4, 4, 4]]])
def test_two_and_four_ranks(gang: Gang, plans: list[list[int]]) -> None:
    check(gang, plans, "momentum")


def test_token_weights(gang: Gang) -> None:
    check(gang, CHANGING, "adam", by_token=True)


def test_clipping(gang: Gang) -> None:
    check(gang, CHANGING, "momentum", clip=0.05)


@pytest.mark.parametrize("by_token", [False, True])
def test_accumulation(gang: Gang, by_token: bool) -> None:
    results = check(gang, CHANGING, "adam", micro=3, clip=0.5, by_token=by_token)
    assert max(max(seen) for _, seen, _ in results) == 3


def test_parking_and_coming_back(gang: Gang) -> None:
    plans = [[8, 4, 4], [16, 0, 0], [8, 0, 8], [0, 0, 16], [0, 16, 0], [6, 5, 5]]
    results = check(gang, [plan for plan in plans for _ in range(2)], "adam", epochs=4)
    followed = {tuple(map(bool, plan)) for _, _, sizes in results for plan in sizes}
    assert followed == {tuple(map(bool, plan)) for plan in plans}, "every set of workers was really in force"


@pytest.mark.parametrize("workers", [1, 3])
def test_prefetching_workers(gang: Gang, workers: int) -> None:
    check(gang, CHANGING, "adam", epochs=5, workers=workers)
