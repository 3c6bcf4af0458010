"""The engine's events: every step once, on every rank, also where a loop is left early, and nothing unasked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from omnilearn import OmniLearn
from omnilearn.observe import read

if TYPE_CHECKING:
    from tests.gang import Gang


def train(folder: str | None, leave_at: int | None = None) -> int:
    """Three epochs of eight steps; the second is left at ``leave_at``. Returns the steps taken."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    with OmniLearn(global_batch=8, park=False, log_dir=folder) as omni:
        model, optimizer = omni.prepare(model, optimizer)
        loader = omni.loader(TensorDataset(torch.randn(64, 4), torch.randint(2, (64,))), shuffle=True)
        for epoch in range(3):
            for k, (x, y) in enumerate(loader):
                omni.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                if epoch == 1 and k == leave_at:
                    break
    return steps


def check(folder: Path, workers: int, steps: int) -> None:
    events = read(folder)
    for rank in range(workers):
        mine = [event for event in events if event["rank"] == rank and event["kind"] == "steps"]
        taken = [event["step"] + i for event in mine for i in range(len(event["batch"]))]
        assert taken == list(range(steps)), f"rank {rank}"
        assert all(len(event["batch"]) == len(event["busy"]) == len(event["wait"]) for event in mine)
    main = [event for event in events if event["rank"] == 0 and event["kind"] != "steps"]
    others = [event["kind"] for event in main if event["kind"] not in ("plan", "curves")]
    assert others == ["run", "epoch", "epoch", "epoch", "end"]
    run, plan = main[:2]
    assert run["options"]["global_batch"] == 8
    assert len(run["workers"]) == workers
    assert run["workers"][0]["cores"] > 0
    assert (plan["kind"], plan["step"], sum(plan["batches"]), plan["parked"]) == ("plan", 0, 8, [])
    assert [(e["epoch"], e["steps"]) for e in main if e["kind"] == "epoch"] == [(0, 8), (1, 8), (2, 8)]
    assert main[-1]["ok"]


@pytest.mark.parametrize("leave_at", [None, 4])
def test_one_process(tmp_path: Path, leave_at: int | None) -> None:
    check(tmp_path, 1, train(str(tmp_path), leave_at))


@pytest.mark.parametrize("leave_at", [None, 4])
def test_two_processes(tmp_path: Path, gang: Gang, leave_at: int | None) -> None:
    steps = gang.run(2, train, str(tmp_path), leave_at)
    check(tmp_path, 2, steps[0])


def test_nothing_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMNILEARN_LOG_DIR", raising=False)
    train(None)
    assert not list(tmp_path.iterdir())


def test_the_launchers_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNILEARN_LOG_DIR", str(tmp_path / "run"))
    train(None)
    assert read(tmp_path / "run")


def test_a_failure_is_an_end_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), OmniLearn(global_batch=8, log_dir=tmp_path):
        _ = 1 // 0
    assert read(tmp_path)[-1]["error"].startswith("ZeroDivisionError")


CRASHES = """
import torch
from omnilearn import OmniLearn
model = torch.nn.Linear(2, 1)
omni = OmniLearn(global_batch=8)
omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
raise ValueError("boom")
"""


def test_so_is_one_outside_of_a_with_block(tmp_path: Path) -> None:
    environment = {**os.environ, "OMNILEARN_LOG_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CRASHES], env=environment, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1
    *_, last = read(tmp_path)
    assert (last["kind"], last["ok"], last["error"]) == ("end", False, "ValueError: boom")
