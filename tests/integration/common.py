"""Small models and data that the integration tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from omnilearn import OmniLearn
from tests.integration.test_exact import Script

__all__ = ["Numbered", "Script", "blobs", "equal", "mlp", "norm_net", "run_epochs", "snapshot"]


class Numbered(Dataset[Any]):
    """Sample i is i, and a few features made of it."""

    def __init__(self, size: int, features: int = 4) -> None:
        self.size, self.features = size, features

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.size:
            raise IndexError(i)
        return torch.sin(torch.arange(1.0, self.features + 1) * (i + 1)), i


def blobs(size: int = 96, features: int = 8, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(0, classes, (size,), generator=generator)
    x = torch.randn(size, features, generator=generator) + 2 * F.one_hot(y, features)
    return TensorDataset(x, y)


def mlp(features: int = 8, classes: int = 3, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, classes))


def norm_net(features: int = 8, classes: int = 3) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(features, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes))


def run_epochs(omni: OmniLearn, model: Any, optimizer: Any, loader: Any, epochs: int = 1, after: Any = None) -> None:
    """The loop of the README. ``after`` is called after each step, and may return True to break."""
    for _ in range(epochs):
        for x, y in loader:
            omni.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if after is not None and after():
                break


def snapshot(model: Any, optimizer: Any = None) -> list[torch.Tensor]:
    """Parameters, buffers and, where given, the optimizer's state, copied."""
    tensors = [t.detach().clone() for _, t in sorted(model.state_dict().items())]
    if optimizer is not None:
        for _, state in sorted(optimizer.state_dict()["state"].items()):
            tensors += [v.detach().clone() for _, v in sorted(state.items()) if isinstance(v, torch.Tensor)]
        tensors += [torch.tensor(group["lr"]) for group in optimizer.param_groups]
    return tensors


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
