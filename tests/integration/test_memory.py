"""A worker that runs out of memory: it computes the same samples in smaller parts, all know, and nothing else changes.

Shortages are real: the process may not grow beyond a limit (``tests/integration/hungry.py``), the allocator raises.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from omnilearn import OmniLearn
from omnilearn.observe import read
from tests.cluster.cluster_helpers import needs_groups
from tests.gang import Gang, WorkerError
from tests.integration import hungry

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory limits of processes are Linux's"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_cuda_memory.py does the same on a card"),
]
ROOT = Path(__file__).parents[2]
MB = 2**20
GROWING = [[8, 8], [8, 8], [2, 14]]


def check(
    gang: Gang, plans: list[list[int]], folder: Path | None = None, *, by_token: bool = False, **options: Any
) -> Any:
    """Train with a shortage; weights are those of one process without, and the events of rank 1."""
    options |= {"log_dir": str(folder) if folder else None, "by_token": by_token}
    results = gang.run(len(plans[0]), hungry.call, plans, options)
    for mine, *theirs in zip(
        hungry.alone(2, sum(plans[0]), by_token), *(r["parameters"] for r in results), strict=True
    ):
        for parameter in theirs:
            assert torch.linalg.norm(mine - parameter) <= 1e-12 * torch.linalg.norm(mine)
    events = [e for e in read(folder) if e["kind"] == "oom"] if folder else []
    return results, events


@pytest.mark.parametrize("by_token", [False, True])
def test_the_first_step_does_not_fit(gang: Gang, tmp_path: Path, by_token: bool) -> None:
    results, events = check(gang, [[5, 11]], tmp_path, by_token=by_token, short={1: (0, 60 * MB)})
    assert events, "it ran out of memory"
    assert (events[0]["rank"], events[0]["step"], events[0]["samples"], events[0]["micro_batch"]) == (1, 0, 11, 5)
    assert max(results[1]["passes"][1:]) < 11
    assert results[0]["passes"] == [5, 5, 5, 2] * 2, "the other worker is left alone"
    for result in results:
        assert any("rank 1 ran out of memory" in line for line in result["log"])
        assert result["known"][1] == results[1]["micro"] < 11, "the split knows of it on every rank"


def test_a_share_grows_beyond_memory(gang: Gang, tmp_path: Path) -> None:
    """The new size is tried without reducing, under DistributedDataParallel: the error stays on its rank."""
    results, events = check(gang, GROWING, tmp_path, short={1: (3, 40 * MB)})
    assert events[0]["samples"] > 8, "the size was new, and the shortage came with it"
    assert all(event["rank"] == 1 for event in events)
    assert max(results[1]["passes"][-8:]) <= events[-1]["micro_batch"]


def test_memory_shrinks_under_a_size_that_ran(gang: Gang, tmp_path: Path) -> None:
    _, events = check(gang, [[8, 8]], tmp_path, short={1: (3, 28 * MB)})
    assert events[0]["samples"] == 8


def test_alone(gang: Gang, tmp_path: Path) -> None:
    results, events = check(gang, [[16]], tmp_path, short={0: (0, 60 * MB)})
    assert events[0]["samples"] == 16
    assert max(results[0]["passes"][-8:]) < 16


def test_a_failed_pass_leaves_no_trace_in_batch_norm(gang: Gang, tmp_path: Path) -> None:
    options = {"short": {1: (0, 60 * MB)}, "norm": True, "epochs": 1, "log_dir": str(tmp_path)}
    results = gang.run(2, hungry.call, [[4, 12]], options)
    failed = [event for event in read(tmp_path) if event["kind"] == "oom"]
    assert failed
    tracked = {float(b) for result in results for b in result["buffers"] if b.dtype == torch.int64}
    went_well = [len(results[0]["passes"]), len(results[1]["passes"]) - len(failed)]
    assert tracked == {max(went_well)}, "num_batches_tracked, the same on all: of the worker that made most passes"
    assert min(results[1]["passes"]) >= 2, "BatchNorm needs two samples"


# Learned in time


@pytest.mark.parametrize("workers", [0, 1])
def test_a_plain_loop_gets_micro_batches_before_trouble(gang: Gang, workers: int) -> None:
    """What was learned from four samples bounds fourteen: the loader cuts, and no error comes."""
    plans = [[12, 4]] * 3 + [[2, 14]]
    results, _ = check(gang, plans, door="plain", short={1: (0, 80 * MB)}, num_workers=workers)
    assert not any("out of memory" in line for line in results[1]["log"])
    assert max(results[1]["passes"]) <= max(results[1]["micro"], 4) < 14, "fourteen were never tried"
    assert results[0]["known"][1] == results[1]["micro"]


def test_the_users_bound_holds(gang: Gang) -> None:
    results, _ = check(gang, GROWING, micro_batch=5)
    assert max(results[1]["passes"]) == 5
    assert results[0]["known"] == [5, 5]


# Not survived, but said


def test_one_sample_does_not_fit(gang: Gang) -> None:
    """In the first step, all raise the same error; later, the others name the rank and its error."""
    with pytest.raises(WorkerError) as raised:
        gang.run(2, hungry.hopeless, 0, 40 * MB)
    assert [kind for kind, _ in raised.value.errors.values()] == ["OutOfMemoryError"] * 2
    for _, text in raised.value.errors.values():
        assert "rank 1 runs out of memory with one sample" in text
    with pytest.raises(WorkerError) as raised:
        gang.run(2, hungry.hopeless, 2, 40 * MB)
    assert raised.value.errors[1][0] == "OutOfMemoryError"
    assert raised.value.errors[0][0] == "PeerFailure"
    assert "rank 1 runs out of memory with one sample" in raised.value.errors[0][1]


def test_in_a_plain_loop_all_are_told_what_to_change(gang: Gang) -> None:
    with pytest.raises(WorkerError) as raised:
        gang.run(2, hungry.call, [[5, 11]], {"door": "plain", "short": {1: (0, 40 * MB)}})
    kind, _ = raised.value.errors[1]
    assert kind in ("RuntimeError", "MemoryError"), "the error itself is what torch raised"
    assert "PeerFailure" in raised.value.errors[0][1]
    for advice in ("omni.step(compute_loss, batch)", "OmniLearn(micro_batch=5)", "11 samples at a time"):
        assert advice in raised.value.errors[0][1]


def test_a_batch_that_cannot_be_cut(gang: Gang) -> None:
    with pytest.raises(WorkerError) as raised:
        gang.run(2, hungry.call, [[5, 11]], {"door": "opaque", "short": {1: (0, 40 * MB)}})
    assert raised.value.errors[1][0] in ("RuntimeError", "MemoryError")
    assert "OmniLearn(micro_batch=5), or give omni.step a batch of tensors" in raised.value.errors[0][1]


def synchronised() -> None:
    with OmniLearn(8, micro_batch=2) as omni:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
        omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_sync_batch_norm_needs_the_same_passes_everywhere(gang: Gang) -> None:
    with pytest.raises(WorkerError, match="micro_batch=2 with SyncBatchNorm") as raised:
        gang.run(2, synchronised)
    assert [kind for kind, _ in raised.value.errors.values()] == ["InfeasibleError"] * 2


# A control group's limit, above which the kernel kills


@needs_groups
def test_the_example_under_an_emulated_limit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "omnilearn", "run", "--emulate", str(ROOT / "examples" / "memory.toml"), "--log-dir",
         str(tmp_path), str(ROOT / "examples" / "memory.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 3" in done.stdout
    events = [event for event in read(tmp_path) if event["kind"] == "oom"]
    assert events, "the limit was met"
    assert {event["rank"] for event in events} == {1}
