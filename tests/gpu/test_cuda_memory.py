"""Running out of a card's memory, for real: the process may use a fraction of it only. Skipped where there is none."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch

from omnilearn import OmniLearn
from tests.gang import Gang, WorkerError
from tests.gpu.test_cuda import STEPS, _data, _model, _profiled, plain
from tests.integration import hungry
from tests.integration.test_memory import GROWING, MB, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize("by_token", [False, True])
def test_the_first_step_does_not_fit(gang: Gang, tmp_path: Path, by_token: bool) -> None:
    results, events = check(gang, [[5, 11]], tmp_path, by_token=by_token, short={1: (0, 60 * MB)})
    assert (events[0]["rank"], events[0]["step"], events[0]["samples"]) == (1, 0, 11)
    assert results[0]["passes"] == [5, 5, 5, 2] * 2
    for result in results:
        assert any("rank 1 ran out of memory" in line for line in result["log"])
        assert result["known"][1] == results[1]["micro"] < 11


def test_a_share_grows_beyond_memory(gang: Gang, tmp_path: Path) -> None:
    _, events = check(gang, GROWING, tmp_path, short={1: (3, 60 * MB)})
    assert events[0]["samples"] > 8
    assert all(event["rank"] == 1 for event in events)


def test_a_plain_loop_gets_micro_batches_before_trouble(gang: Gang) -> None:
    """The allocator's statistics and the process's fraction of the card are enough to know."""
    results, _ = check(gang, [[12, 4]] * 3 + [[2, 14]], door="plain", short={1: (0, 100 * MB)})
    assert not any("out of memory" in line for line in results[1]["log"])
    assert max(results[1]["passes"]) <= max(results[1]["micro"], 4) < 14


def test_one_sample_does_not_fit(gang: Gang) -> None:
    with pytest.raises(WorkerError) as raised:
        gang.run(2, hungry.hopeless, 0, 40 * MB)
    assert [kind for kind, _ in raised.value.errors.values()] == ["OutOfMemoryError"] * 2
    for _, text in raised.value.errors.values():
        assert "rank 1 runs out of memory with one sample" in text


def test_in_a_plain_loop_all_are_told_what_to_change(gang: Gang) -> None:
    with pytest.raises(WorkerError) as raised:
        gang.run(2, hungry.call, [[5, 11]], {"door": "plain", "short": {1: (0, 40 * MB)}})
    assert raised.value.errors[1][0] == "OutOfMemoryError", "torch's own"
    assert "omni.step(compute_loss, batch)" in raised.value.errors[0][1]


def stepping() -> collections.Counter[str]:
    with OmniLearn(32) as omni:
        model = _model()
        model, _ = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        loader = omni.loader(_data())

        def steps() -> Any:
            for batch in loader:
                omni.step(lambda part: torch.nn.functional.mse_loss(model(part[0]), part[1]), batch)
                yield

        return _profiled(steps())


def test_omni_step_adds_no_synchronisation(gang: Gang) -> None:
    (before,), (after,) = gang.run(1, plain), gang.run(1, stepping)
    assert sum(after.values()) - sum(before.values()) < STEPS, f"plain: {before}, omni.step: {after}"
