"""Events on a CUDA device: losses are those of their steps although nobody waits for them, and memory is the card's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from omnilearn import OmniLearn
from omnilearn.observe import steps
from tests.gang import Gang

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def train(folder: str) -> list[float]:
    """Forty steps; every loss as the script sees it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))
    x = torch.randn(40 * 64, 512)
    seen = []
    with OmniLearn(global_batch=64, park=False, log_dir=folder) as omni:
        model, optimizer = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-5))
        for a, b in omni.loader(TensorDataset(x, x.sum(dim=1, keepdim=True)), shuffle=True):
            loss = torch.nn.functional.mse_loss(model(a), b)
            omni.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return [float(loss) for loss in seen]


@pytest.mark.parametrize("workers", [1, 2])
def test_losses_are_those_of_their_steps(tmp_path: Path, gang: Gang, workers: int) -> None:
    seen = gang.run(workers, train, str(tmp_path))
    rows = steps(tmp_path)
    for rank in range(workers):
        mine = {row["step"]: row["loss"] for row in rows if row["worker"] == rank}
        assert sorted(mine) == list(range(40))
        assert [mine[step] for step in range(40)] == pytest.approx(seen[rank], rel=1e-4)
    assert all(row["memory"] > 4 * 512 * 4096 for row in rows)
