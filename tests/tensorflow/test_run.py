"""Scripts started by ``omnilearn run --framework tensorflow``: faults, examples, clusters that exist already."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import Faults
from tests.tensorflow.gang import cluster

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 150.0


NO_TORCH = os.pathsep.join(map(str, [ROOT / "tests" / "tensorflow" / "no_torch", ROOT / "src", ROOT]))
"""As PYTHONPATH: a process that has it finds no PyTorch."""


def start(*arguments: Any, **environment: str) -> subprocess.Popen[str]:
    """``omnilearn run --framework tensorflow``, where PyTorch is not installed."""
    return python("-m", "omnilearn", "run", "--framework", "tensorflow", *arguments, **environment)


def python(*arguments: Any, **environment: str) -> subprocess.Popen[str]:
    settings = {key: value for key, value in os.environ.items() if key not in ("TF_CONFIG", "OMNILEARN_LOG_DIR")}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**settings, "PYTHONPATH": NO_TORCH, **environment},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("kind", "rank", "first", "others"),
    [
        ("kill", 1, "rank 1 failed first: killed by SIGKILL", "lost rank 1"),
        (
            "exception",
            0,
            "rank 0 failed first: tests.faults.InjectedError: disk on fire",
            "rank 0 failed: .*disk on fire",
        ),
    ],
)
def test_the_others_end_and_name_who_failed(kind: str, rank: int, first: str, others: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    script = ROOT / "tests" / "tensorflow" / "faulty.py"
    status, _, err = finish(start("--nproc", 3, "--log-dir", tmp_path, script, kind, rank, mark))
    assert Faults(kind, rank, 4, mark).fired
    assert status != 0
    assert first in err
    for survivor in {0, 1, 2} - {rank}:
        said = (tmp_path / "logs" / f"worker-{survivor}.stderr").read_text()
        assert re.search(f"PeerFailure: {others}", said), said[-2000:]


def test_these_processes_find_no_torch() -> None:
    code = "import importlib.util, numpy; print(importlib.util.find_spec('torch')); import torch"
    status, out, err = finish(python("-c", code))
    assert (status, out) == (1, "None\n")
    assert "No module named 'torch'" in err


def test_fit_example(tmp_path: Path) -> None:
    status, out, err = finish(start("--nproc", 2, "--log-dir", tmp_path, "examples/tensorflow_fit.py"))
    assert status == 0, err
    assert "Epoch 2/6" in out
    assert float(re.findall(r"accuracy (\d\.\d+), batches", out)[0]) > 0.8
    assert (tmp_path / "rank-1.jsonl").exists()
    status, _, err = finish(python("-m", "omnilearn", "report", tmp_path, "-o", tmp_path / "page.html"))
    assert status == 0, err
    assert "tensorflow" in (tmp_path / "page.html").read_text().lower()


def test_a_cluster_that_exists_is_respected(tmp_path: Path) -> None:
    """A chief and a worker, each started by itself, as Kubernetes does it; and the loop example."""
    first, second = cluster(2)["worker"]
    places = [{"type": "chief", "index": 0}, {"type": "worker", "index": 0}]
    members = {"chief": [first], "worker": [second]}
    processes = [
        start(
            "--log-dir", tmp_path / place["type"], "examples/tensorflow_loop.py",
            TF_CONFIG=json.dumps({"cluster": members, "task": place}), OMP_NUM_THREADS="1",
        )
        for place in places
    ]  # fmt: skip
    results = [finish(process) for process in processes]
    assert [status for status, _, _ in results] == [0, 0], results
    assert float(re.findall(r"epoch 3: accuracy (\d\.\d+)", results[0][1])[0]) > 0.85  # the chief is rank 0
    assert "accuracy" not in results[1][1]
    assert (tmp_path / "worker" / "rank-1.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--nnodes", "2"], {"PYTHONPATH": str(ROOT / "src")}, "is torchrun's"),
        (["--nproc", "2"], {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:2"]}}'}, "a cluster that exists already"),
        (["--nproc", "many"], {}, "must be a number"),
    ],
)
def test_wrong_use_is_said_before_anything_starts(
    arguments: list[str], environment: dict[str, str], words: str, tmp_path: Path
) -> None:
    if "--nnodes" in arguments:  # which is known to those who have it
        pytest.importorskip("torch")
    script = tmp_path / "x.py"
    script.write_text("raise SystemExit(3)\n")
    status, _, err = finish(start("--log-dir", tmp_path, *arguments, script, **environment))
    assert status == 2
    assert words in err


def test_an_emulated_worker_has_as_many_threads_as_whole_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = tmp_path / "threads.py"
    script.write_text("import os; print('threads', os.environ['OMP_NUM_THREADS'])")
    code, out, err = finish(start("--emulate", "cpu=1", "--log-dir", tmp_path / "log", script))
    assert code == 0, err
    assert "threads 1\n" in out
