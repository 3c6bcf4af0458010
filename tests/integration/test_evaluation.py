"""Evaluation: each sample once over those who evaluate; means that are the same on all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from omnilearn import OmniLearn
from tests.gang import Gang, WorkerError
from tests.integration.common import Numbered, Script, blobs, equal, norm_net, run_epochs, snapshot


def evaluated(plans: list[list[int]], size: int, inside: bool, workers: int) -> Any:
    with OmniLearn(12, policy=Script(plans)) as omni:
        model, opt = omni.prepare(model := norm_net(), torch.optim.SGD(model.parameters(), lr=0.1))
        val, loader = (
            omni.loader(Numbered(size, 8), train=False, batch_size=3, num_workers=workers),
            omni.loader(blobs()),
        )
        found = []

        def evaluate() -> None:
            model.eval()
            seen: list[int] = []
            total = 0.0
            with torch.no_grad():
                for x, i in val:
                    assert len(i) <= 3
                    seen += i.tolist()
                    total += float(i.sum()) + 0 * float(model(x).sum())
            model.train()
            mean = omni.mean(total / max(len(seen), 1), weight=len(seen))
            found.append((omni._engine.participants, seen, mean, snapshot(model)[1:4]))  # type: ignore[union-attr]

        run_epochs(omni, model, opt, loader, 1, evaluate if inside else None)
        if not inside:
            evaluate()
        return found


@pytest.mark.parametrize("size", [25, 2])
@pytest.mark.parametrize("plans", [[[4, 4, 4], [2, 8, 2]], [[6, 0, 6], [0, 0, 12]]])
def test_each_sample_once_after_an_epoch(gang: Gang, plans: list[list[int]], size: int) -> None:
    results = gang.run(3, evaluated, plans, size, False, 1)
    assert sorted(i for ((_, seen, _, _),) in results for i in seen) == list(range(size)), "the parked help"
    assert {found[0][2] for found in results} == {(size - 1) / 2}
    assert all(equal(results[0][0][3], found[0][3]) for found in results), "with the same statistics"


def test_each_sample_once_inside_the_loop(gang: Gang) -> None:
    results = gang.run(3, evaluated, [[4, 4, 4], [6, 0, 6], [0, 0, 12], [0, 6, 6]], 25, True, 0)
    ranks = {found[0] for rank in results for found in rank}
    assert {(0, 1, 2), (0, 2), (2,)} <= ranks
    for workers in ranks:
        rounds = [[f for f in results[rank] if f[0] == workers] for rank in workers]
        for together in zip(*rounds, strict=True):
            assert sorted(i for _, seen, _, _ in together for i in seen) == list(range(25))
            assert {mean for _, _, mean, _ in together} == {12.0}


def means() -> Any:
    with OmniLearn(12, policy=Script([[8, 4]])) as omni:
        model, _ = omni.prepare(model := norm_net(), torch.optim.SGD(model.parameters(), lr=0.1))
        value = float(omni.rank)
        found = [
            omni.mean(value),
            omni.mean(value, weight=1 + 2 * omni.rank),
            omni.mean(math.nan if omni.rank else 5.0, weight=1 - omni.rank),
            omni.mean(torch.tensor([value, 2.0])).tolist(),
            omni.mean(torch.tensor(value, requires_grad=True)),
        ]
        for x, y in omni.loader(blobs(12)):
            omni.step(lambda b: torch.nn.functional.cross_entropy(model(b[0]), b[1]), (x, y))
            found.append(omni.mean(value))  # weighted by the batches 8 and 4
        return found


def test_means(gang: Gang) -> None:
    one, other = gang.run(2, means)
    assert one == other == [0.5, 0.75, 5.0, [0.5, 2.0], 0.5, pytest.approx(1 / 3)]


def refused() -> None:
    with OmniLearn(12) as omni:
        omni.prepare(model := norm_net(), torch.optim.SGD(model.parameters(), lr=0.1))
        omni.loader(blobs(), train=False, sampler=[1, 2])


def test_a_sampler_is_refused(gang: Gang) -> None:
    with pytest.raises(WorkerError, match="takes no sampler"):
        gang.run(2, refused)
