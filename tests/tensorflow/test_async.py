"""Asynchronous training with parameter servers: real processes, one of them killed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnilearn.observe import read
from tests.tensorflow.gang import Gang
from tests.tensorflow.test_run import ROOT, finish, start


def test_counts_are_exact_and_a_killed_worker_is_survived(tmp_path: Path) -> None:
    script = ROOT / "tests" / "tensorflow" / "async_job.py"
    status, out, err = finish(start("--nproc", 2, "--ps", 1, "--log-dir", tmp_path, script, tmp_path))
    assert status == 0, err
    assert (tmp_path / "killed").exists()
    assert "rank 1 ended (status -9); the others go on" in err
    result = told(out)
    before, after = result["before"], result["after"]

    # Every step that the chief heard of is in the counts, and nothing else, while nobody dies.
    events = read(tmp_path)
    rows = [row for e in events if e["kind"] == "updates" for row in zip(e["worker"], e["batch"], strict=True)]
    split = next(k for k in range(len(rows) + 1) if sum(batch for _, batch in rows[:k]) == before["samples"])
    assert split == before["updates"]
    assert {worker for worker, _ in rows[:split]} == {0, 1}
    sizes = {batch for _, batch in rows[:split]}
    assert 12 in sizes
    assert sizes & {4, 8, 16, 20}  # changed while running; which worker takes a step is the coordinator's choice
    assert before["traces"] == 1
    assert 4 * 240 <= before["samples"] <= 4 * 240 + 6 * 20  # with the steps under way at the end
    assert before["history"]["val_loss"][-1] < before["history"]["val_loss"][0]
    assert before["history"]["val_accuracy"][-1] > 0.8

    # A step whose worker died may have been counted without the chief hearing of it, and was done again.
    assert after["samples"] >= before["samples"] + 4 * 240
    assert after["updates"] >= len(rows)
    assert len(after["history"]["loss"]) == 4
    plans = [event["batches"] for event in events if event["kind"] == "plan"]
    assert plans[0] == [12, 12]


def told(out: str) -> Any:
    return json.loads(next(line for line in out.splitlines() if "{" in line).partition("] ")[2])


@pytest.mark.parametrize(("staleness", "threshold"), [("bounded", 1), ("discard", 0)])
def test_rules_checkpoints_and_bad_gradients(staleness: str, threshold: int, tmp_path: Path) -> None:
    script, folder = ROOT / "tests" / "tensorflow" / "async_rules.py", tmp_path / "saved"
    status, out, err = finish(
        start("--nproc", 2, "--ps", 1, "--log-dir", tmp_path, script, staleness, threshold, folder)
    )
    assert status == 0, err
    result = told(out)

    # What became of every gradient, in the events as PyTorch's server writes them.
    found = read(tmp_path)
    rows = [row for e in found if e["kind"] == "updates" for row in zip(e["staleness"], e["weight"], strict=True)]
    if staleness == "bounded":
        assert max(age for age, _ in rows) <= threshold
    else:
        assert result["counts"]["discarded"] > 0
        assert all(weight == 0 for age, weight in rows if age > threshold)
    assert result["skipped"] > 0  # the sample that is not finite; and it did not spoil the model:
    assert np.isfinite(result["first"]["val_loss"]).all()
    applied = result["counts"]["updates"]
    versions = [event["version"] for event in found if event["kind"] == "updates"]
    assert applied in versions
    assert applied + result["counts"]["discarded"] + result["skipped"] >= result["counts"]["samples"] / 24

    # Half way through the second epoch, and on from there.
    with np.load(folder / "checkpoint.npz") as data:
        facts = json.loads(data["facts"].tobytes())
        arrays = [np.frombuffer(data[str(k)], kind).reshape(shape) for k, (kind, shape) in enumerate(facts["arrays"])]
    assert (result["extra"], result["epoch"]) == ({"note": "half way"}, 1)
    assert result["loaded_counts"] == facts["asynchronous"]["counts"]
    assert 240 < result["loaded_counts"]["samples"] < facts["asynchronous"]["goal"] == 480
    assert all(np.array_equal(a, np.asarray(b, a.dtype)) for a, b in zip(arrays, result["loaded"], strict=True))
    assert len(result["second"]["loss"]) == 2
    assert 720 <= result["end"]["samples"] < 720 + 6 * 24
    assert [event["what"] for event in found if event["kind"] == "checkpoint"] == ["saved", "loaded"]

    # Events of every worker's steps, and what the mode does not have.
    steps = [event for event in found if event["kind"] == "steps"]
    assert {event["worker"] for event in steps} == {0, 1}
    assert all(min(event["busy"]) > 0 < min(event["pull"]) for event in steps)
    assert sum(sum(e["push"]) for e in steps) > 0.05 * sum(sum(e["busy"]) for e in steps)  # the update is in it
    run = next(event for event in found if event["kind"] == "run")
    assert (run["mode"], run["backend"], len(run["workers"]), result["workers"]) == ("async", "tensorflow", 2, 2)
    assert found[-1]["kind"] == "end"
    for name in ("step", "dataset", "mean"):
        assert "mode='sync'" in result["refused"][name]
    assert "prepare" in result["refused"]["load"]
    assert set(result["first"]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert result["evaluated"] == pytest.approx(result["plain"], rel=1e-4)


def test_async_example(tmp_path: Path) -> None:
    status, out, err = finish(start("--nproc", 2, "--ps", 1, "--log-dir", tmp_path, "examples/tensorflow_async.py"))
    assert status == 0, err
    assert float(re.findall(r"accuracy (\d\.\d+), Counts", out)[0]) > 0.7


@pytest.mark.parametrize("kind", ["momentum", "adam", "scaler"])
def test_the_learning_rate_of_one_update_is_scaled(workers: Gang, kind: str) -> None:
    for whole, half in workers.run("scaled_update", kind):
        assert (whole > 0).all()
        assert half == pytest.approx(whole / 2, rel=1e-4)


def test_without_a_cluster_it_trains_alone(workers: Gang) -> None:
    for result in workers.run("alone_async"):
        assert result["size"] == 1
        assert result["counts"] == {"updates": 21, "samples": 159, "discarded": 0}
        assert result["loss"][-1] < result["loss"][0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sync with ps", "use mode='async'"),
        ("async without ps", "--ps 1"),
        ("evaluator", "a chief, workers and ps"),
        ("no json", "TF_CONFIG cannot be read"),
    ],
)
def test_what_cannot_work_is_said(workers: Gang, kind: str, words: str) -> None:
    for message in workers.run("refused_cluster", kind):
        assert words in message
