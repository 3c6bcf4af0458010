"""The last step of an epoch: what is left, whoever is there to compute it; those without a sample add nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from omnilearn import OmniLearn, OmniLearnError
from tests.gang import Gang
from tests.integration.common import Numbered, Script, blobs, mlp, snapshot


def trained(
    size: int, batch: int, plans: Any, options: dict[str, Any], norm: bool = False, weights: bool = False
) -> Any:
    data = blobs(size)
    torch.manual_seed(2)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)) if norm else mlp()
    model = model.double()
    with OmniLearn(batch, policy=Script(plans)) as omni:
        model, opt = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loader = omni.loader(data, **options)
        steps, counted, lent = [], 0, 0
        for _ in range(2):
            for x, y in loader:
                loss = F.cross_entropy(model(x.double()), y)
                omni.backward(loss, weight=2.0 * len(y) if weights else None)
                opt.step()
                opt.zero_grad()
                counted += omni.samples
                lent += not omni.samples
                steps.append(omni.mean(float(omni.samples)) if omni.samples else omni.mean(0.0, weight=0.0))
            assert omni.samples == 0
        return counted, lent, len(steps), len(loader), snapshot(model, opt)


def one_process(size: int, batch: int, last: str) -> list[torch.Tensor]:
    model = mlp().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = blobs(size).tensors
    cuts = list(range(0, size, batch))
    if last == "drop" or (last == "merge" and len(cuts) > 1 and size % batch):
        cuts = cuts[: size // batch]
    for _ in range(2):
        for k, start in enumerate(cuts):
            stop = size if last == "merge" and k == len(cuts) - 1 else min(start + batch, size)
            F.cross_entropy(model(x[start:stop].double()), y[start:stop]).backward()
            opt.step()
            opt.zero_grad()
    return snapshot(model, opt)


@pytest.mark.parametrize("options", [{}, {"last": "merge"}, {"drop_last": True}, {"num_workers": 2}])
@pytest.mark.parametrize(("size", "batch"), [(151, 30), (152, 30), (29, 30), (150, 30)])
def test_weights_are_those_of_one_process(gang: Gang, size: int, batch: int, options: dict[str, Any]) -> None:
    if options.get("drop_last") and size < batch:
        return
    last = "drop" if options.get("drop_last") else options.get("last", "keep")
    expected = one_process(size, batch, last)
    plans = [[10, 10, 10], [4, 16, 10], [20, 10, 0], [2, 2, 26]]
    results = gang.run(3, trained, size, batch, plans, options)
    used = size - size % batch if last == "drop" else size
    assert sum(counted for counted, *_ in results) == 2 * used
    if last == "keep" and 0 < size % batch < 3:
        assert sum(lent for _, lent, *_ in results) >= 2, "some had none of their own, and took part"
    for *_, length, state in results:
        assert length == (size // batch if last == "drop" or (last == "merge" and size > batch) else -(-size // batch))
        for ours, theirs in zip(state, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_weights_of_ones_own_in_the_last_step(gang: Gang) -> None:
    expected = one_process(151, 30, "keep")
    for *_, state in gang.run(3, trained, 151, 30, [[10, 10, 10]], {}, False, True):
        for ours, theirs in zip(state, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def statistics(size: int) -> Any:
    """How often each worker's running statistics were moved."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))
    with OmniLearn(30, policy="uniform") as omni:
        model, opt = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for x, y in omni.loader(blobs(size)):
            omni.backward(F.cross_entropy(model(x), y))
            opt.step()
            opt.zero_grad()
            last = int(model[0].num_batches_tracked), omni.samples
        return last


def test_lent_samples_leave_no_trace_in_buffers(gang: Gang) -> None:
    """152 samples: in the sixth step one of three workers has two, the others none."""
    results = gang.run(3, statistics, 152)
    assert sorted(results) == [(5, 0), (5, 0), (6, 2)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_single_sample_for_batch_norm_is_refused_alike(gang: Gang, ranks: int) -> None:
    def words(options: dict[str, Any]) -> str:
        try:
            gang.run(ranks, trained, 151, 30, [[30 // ranks] * ranks], options, True)
        except AssertionError as error:
            return str(error)
        return ""

    told = words({})
    assert "the last step of an epoch has 1 sample" in told
    assert "drop_last=True" in told
    assert "last='merge'" in told
    assert words({"last": "merge"}) == words({"last": "drop"}) == ""


def test_options_that_contradict_each_other() -> None:
    with OmniLearn(4) as omni:
        omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(OmniLearnError, match="drop_last=True and last='merge'"):
            omni.loader(blobs(8), drop_last=True, last="merge")
        with pytest.raises(OmniLearnError, match="last must be one of"):
            omni.loader(blobs(8), last="wrap")


def evaluated(plans: Any) -> Any:
    """Nobody's sample is counted twice where the loop counts by ``omni.samples``."""
    with OmniLearn(8, policy=Script(plans)) as omni:
        model, _ = omni.prepare(model := nn.Linear(4, 1), torch.optim.SGD(model.parameters(), lr=0.1))
        seen: list[int] = []
        for x, i in omni.loader(Numbered(17), shuffle=True):
            omni.step(lambda b: model(b).mean(), x)
            seen += i.tolist()[: omni.samples]
        return seen


def test_every_sample_once(gang: Gang) -> None:
    assert sorted(i for seen in gang.run(3, evaluated, [[3, 3, 2]]) for i in seen) == list(range(17))


def test_a_smaller_data_set_than_a_batch_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with OmniLearn(64) as omni:
        omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
        omni.loader(TensorDataset(torch.zeros(10, 8)))
    assert "global_batch=64 is more than the 10 samples of the data set" in caplog.text
