"""Asynchronous training with parameter servers: real processes, one of them killed."""

from __future__ import annotations

import json
import re
from pathlib import Path

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
    told = json.loads(next(line for line in out.splitlines() if "{" in line).partition("] ")[2])
    before, after = told["before"], told["after"]

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


def test_async_example(tmp_path: Path) -> None:
    status, out, err = finish(start("--nproc", 2, "--ps", 1, "--log-dir", tmp_path, "examples/tensorflow_async.py"))
    assert status == 0, err
    assert float(re.findall(r"accuracy (\d\.\d+), Counts", out)[0]) > 0.7


def test_without_a_cluster_it_trains_alone(workers: Gang) -> None:
    for result in workers.run("alone_async"):
        assert result["size"] == 1
        assert result["loss"][-1] < result["loss"][0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bounded", "staleness='bounded' cannot be had"),
        ("sync with ps", "use mode='async'"),
        ("async without ps", "--ps 1"),
        ("evaluator", "a chief, workers and ps"),
        ("no json", "TF_CONFIG cannot be read"),
    ],
)
def test_what_cannot_work_is_said(workers: Gang, kind: str, words: str) -> None:
    for message in workers.run("refused_cluster", kind):
        assert words in message
