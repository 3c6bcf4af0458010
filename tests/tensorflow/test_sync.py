"""Synchronous training with TensorFlow: real processes, real collectives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnilearn.observe import read
from tests.tensorflow.gang import Gang

SIZE = 53


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("kind", "by_token", "micro_batch"),
    [
        ("sgd", False, None),
        ("momentum", True, None),
        ("adam", False, None),
        ("clipped", False, None),
        ("momentum", False, 2),
    ],
)
def test_a_step_is_the_one_of_a_single_machine(
    workers: Gang, kind: str, by_token: bool, micro_batch: int | None
) -> None:
    results = workers.run("exact", kind, by_token, micro_batch)
    for result in results:
        assert result["apart"] < 1e-10
        assert same(result["weights"], results[0]["weights"])
        assert result["traces"] <= 2  # one with the others and one alone, whatever the batches
    assert sum(result["samples"] for result in results) == 2 * SIZE
    assert {(0,), (1, 2), (0, 1, 2)} <= set.union(*(result["sets"] for result in results))
    # Rank 2 sits some steps out; the losses it has are those of the whole global batch.
    for result in results:
        assert all(min(abs(loss - theirs) for theirs in result["their_losses"]) < 1e-10 for loss in result["losses"])


@pytest.mark.parametrize(
    ("kind", "shuffle"),
    [
        ("arrays", True),
        ("tensors", False),
        ("tf.data", True),
        ("batched", False),
        ("stream", False),
        ("pydataset", True),
    ],
)
def test_every_sample_once_per_epoch(workers: Gang, kind: str, shuffle: bool) -> None:
    results = workers.run("once", kind, shuffle)
    for epoch in range(2):
        assert sorted(i for seen in results for i in seen[epoch]) == list(range(SIZE))
    first, second = ([i for seen in results for i in seen[epoch]] for epoch in range(2))
    if shuffle or kind == "batched":
        assert first != second


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("infinite", "leave repeat\\(\\) out"),
        ("unknown", "does not know its size"),
        ("deep shuffle", "shuffles before"),
        ("stream shuffled", "cannot read this dataset at any index"),
        ("lengths", "differ in their number of samples"),
        ("generator", "no known size"),
        ("batch size", "takes no batch_size"),
    ],
)
def test_data_that_cannot_be_used_is_refused(workers: Gang, kind: str, words: str) -> None:
    for message in workers.run("refused_data", kind):
        assert re.search(words, message), message


@pytest.mark.parametrize("kind", ["batchnorm", "mixed precision"])
def test_all_ranks_end_with_the_same_model(workers: Gang, kind: str) -> None:
    results = workers.run("consistent", kind)
    for result in results:
        assert same(result["weights"], results[0]["weights"])
        assert np.isfinite(result["losses"]).all()
        assert result["losses"][-1] < result["losses"][0] / 2
        assert result["minimum"] == (2 if kind == "batchnorm" else 1)
    if kind == "mixed precision":  # the first scale is too large for float16: the scaler has brought it down
        scale = [w for w in results[0]["weights"] if w.shape == () and w > 1000]
        assert scale
        assert float(scale[0]) < 2.0**20


def test_a_run_goes_on_from_a_checkpoint(workers: Gang, tmp_path: Path) -> None:
    for result in workers.run("resumed", str(tmp_path)):
        assert same(result["through"], result["again"])
        assert (result["nothing"], result["extra"]) == (None, {"note": "half way"})
        assert (result["epoch"], result["step"]) == (1, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.npz"]


def test_a_loop_can_be_left_while_a_worker_is_parked(workers: Gang) -> None:
    results = workers.run("broken_off")
    for result in results:
        assert same(result["after"], results[0]["after"])
        assert same(result["end"], results[0]["end"])
        assert result["outside"] == 1.0
    assert results[0]["inside"][0] == 0.0  # rank 0 alone
    assert results[1]["inside"][-1] == pytest.approx(0.5)
    assert results[0]["steps"] == -(-SIZE // 12)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("option of one rank", "seed is 0 on rank 0 and 1 on rank 1"),
        ("bad value on one rank", "nonfinite must be 'raise' or 'skip'"),
        ("unknown rule", "unknown staleness rule 'whatever'"),
        ("sync and stale", "belong to mode='async'"),
        ("other model", "models differ between ranks"),
        ("other data", "number of samples is 53 on rank 0 and 52 on rank 1"),
        ("vector", "one number"),
        ("no step", "was not called for the last batch"),
        ("twice", "called twice"),
        ("nan", "the gradient of step 0 is not finite"),
        ("skip", "skipped 1"),
    ],
)
def test_mistakes_are_named_on_all_ranks(workers: Gang, kind: str, words: str) -> None:
    for message in workers.run("wrong", kind):
        assert words in message


def test_events_are_those_of_pytorch(workers: Gang, tmp_path: Path) -> None:
    workers.run("events", str(tmp_path))
    found = read(tmp_path)
    assert {"run", "plan", "epoch", "steps", "end"} <= {event["kind"] for event in found}
    steps = [event for event in found if event["kind"] == "steps"]
    assert {event["rank"] for event in steps} == {0, 1, 2}
    assert any(busy > 0 for event in steps for busy in event["busy"])
    assert all(loss is None or loss > 0 for event in steps for loss in event["loss"])
    assert any(loss is not None for event in steps for loss in event["loss"])
    assert all(event["memory"] > 0 for event in steps)
    run = next(event for event in found if event["kind"] == "run")
    assert (run["backend"], run["workers"][2]["device"]) == ("tensorflow", "cpu")


def test_anybody_may_be_the_source_however_often(workers: Gang) -> None:
    for heard in workers.run("spread_in_turn"):
        assert all(heard)
