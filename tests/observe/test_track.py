"""Trackers get what the events say, live or afterwards, and can never harm a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.observe.made import async_run, sync_run
from torch.utils.data import TensorDataset

from omnilearn import OmniLearn, cli
from omnilearn.errors import UsageError
from omnilearn.observe import EventLog, replay, track
from omnilearn.observe.tensorboard import OfThisHost, TensorBoard


class Listing:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int, float]] = []
        self.closed = 0

    def log(self, values: Mapping[str, float], step: int, t: float) -> None:
        self.logged.append((dict(values), step, t))

    def close(self) -> None:
        self.closed += 1

    def names(self) -> set[str]:
        return {name for values, _, _ in self.logged for name in values}


def test_replay(tmp_path: Path) -> None:
    seen = Listing()
    replay(sync_run(tmp_path, 3, 200), seen)
    wanted = {f"{name}/worker {k}" for name in ("batch", "busy_ms", "wait_ms", "data_ms", "loss") for k in range(3)}
    assert wanted | {"samples_per_second", "loss"} <= seen.names()
    assert seen.closed == 1
    assert [values["batch/worker 0"] for values, _, _ in seen.logged if "batch/worker 0" in values] == [32, 21]
    last = [step for values, step, _ in seen.logged if "busy_ms/worker 1" in values]
    assert last == sorted(last)
    assert last[-1] == 199
    busy = [values["busy_ms/worker 0"] for values, _, _ in seen.logged if "busy_ms/worker 0" in values]
    assert 100 < busy[0] < 200  # (4/√0.5 + 2·32/0.5) ms


def test_replay_of_an_asynchronous_run(tmp_path: Path) -> None:
    seen = Listing()
    replay(async_run(tmp_path, 2, 5.0), seen)
    assert {"staleness/worker 0", "staleness/worker 1", "samples_per_second"} <= seen.names()


def test_a_failing_tracker_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Listing):
        def log(self, values: Mapping[str, float], step: int, t: float) -> None:
            raise ConnectionError("no route")

    with track(sync_run(tmp_path, 2, 20), Broken()):
        pass
    assert [record.getMessage() for record in caplog.records] == ["Broken tracks no more: ConnectionError: no route"]


def test_a_training_script_tracks_from_rank_0(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = Listing()
    with OmniLearn(global_batch=8, log_dir=tmp_path) as omni:
        omni.track(seen)
        model, optimizer = omni.prepare(model, optimizer)
        for x, y in omni.loader(TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))):
            omni.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert seen.closed == 1
    assert {"batch/worker 0", "busy_ms/worker 0", "loss/worker 0", "samples_per_second"} <= seen.names()


def test_tracking_needs_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNILEARN_LOG_DIR", raising=False)
    with OmniLearn(global_batch=8) as omni, pytest.raises(UsageError, match="give OmniLearn"):
        omni.track(Listing())


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found: dict[str, list[tuple[int, float]]] = {}
    for path in folder.glob("events.out.tfevents.*"):
        for event in loader.LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_tensorboard_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    folder = sync_run(tmp_path / "run", 2, 60)
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "r.html"), "--tensorboard"]) == 0
    found = scalars(folder)
    assert {"batch/worker 0", "busy_ms/worker 1", "samples_per_second", "loss"} <= set(found)
    assert found["batch/worker 0"][0] == (0, 32.0)


def test_of_several_hosts_one_writes(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    elsewhere, here = sync_run(tmp_path / "a", 2, 20, name="elsewhere"), tmp_path / "b"
    log = EventLog(here, 0)
    log.write("plan", step=0, batches=[4, 4])  # who knows where it ran: then we write
    log.close()
    for folder in (elsewhere, here):
        replay(folder, OfThisHost(folder))
    assert not list(elsewhere.glob("events.out*"))
    assert scalars(here)["batch/worker 1"] == [(0, 4.0)]


def test_without_the_package_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        TensorBoard(tmp_path).log({"a": 1.0}, 0, 0.0)


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_the_examples_of_trackers(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    script = Path(__file__).parents[2] / "examples" / "trackers" / f"{name}_tracker.py"
    done = subprocess.run(
        [sys.executable, str(script), str(sync_run(tmp_path / "run", 2, 40))],
        cwd=tmp_path,
        env={**os.environ, "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("mlflow.db") if name == "mlflow" else tmp_path.glob("wandb/offline-run-*/*.wandb"))
