"""Killed workers, and machines that come and go, under the launcher: training goes on from the last checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from omnilearn import OmniLearn
from omnilearn.cluster.emulator import remove_stale
from omnilearn.cluster.ports import free_ports
from tests.faults import Faults
from tests.integration.asynchronous import Counter, OneHot, uses
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
SIZE, BATCH = 48, 8
SECONDS = 120.0


def train(folder: Path, kind: str, rank: int, mode: str) -> None:
    """A user's script. Weight i of its model says how often sample i was used; it ends after an epoch in which there is
    a file ``enough``, or after three."""
    scaling: Any = {"lr_scaling": "none"} if mode == "async" else {}
    omni = OmniLearn(BATCH, policy="uniform", mode=mode, seed=3, **scaling)
    model = Counter(SIZE)
    model, optimizer = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=BATCH if mode == "sync" else 1.0))
    loader = omni.loader(OneHot(SIZE), shuffle=True)
    said = omni.resume(folder)
    if omni.is_main:
        with (folder / "starts").open("a") as file:
            file.write(json.dumps([omni.world_size, omni.global_step, said]) + "\n")
    faults: Any = Faults(kind, rank, 9, folder / "mark") if kind == "kill" else lambda loss: loss
    while kind == "machines" or omni.epoch < 3:
        for x in loader:
            loss = model(x)
            omni.backward(faults(loss / len(x) if mode == "sync" else loss))
            optimizer.step()
            optimizer.zero_grad()
            omni.save(folder, every=2, word="go on")
        if omni.mean(float((folder / "enough").exists())) > 0:
            break
    if omni.is_main:
        (folder / "end").write_text(json.dumps([omni.epoch, uses(model)]))


def launch(folder: Path, *options: str, script: tuple[Any, ...]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "omnilearn", "run", *options, "--log-dir", str(folder / "logs"), "-m"]
    return subprocess.Popen(
        [*command, "tests.integration.test_restart", json.dumps([str(folder), *script])],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, cwd=ROOT, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def starts(folder: Path) -> list[Any]:
    """Of each start: how many workers there were, the step it went on from, and what was saved with it."""
    path = folder / "starts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ended(folder: Path) -> tuple[int, list[float]]:
    epochs, used = json.loads((folder / "end").read_text())
    return epochs, used


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(tmp_path: Path, mode: str) -> None:
    faults = Faults("kill", 1, 9, tmp_path / "mark")
    launcher = launch(tmp_path, "--nproc", "2", "--max-restarts", "1", script=("kill", 1, mode))
    _, said = launcher.communicate(timeout=SECONDS)
    assert faults.fired
    assert launcher.returncode == 0, said
    (_, first, nothing), (_, second, said_before) = starts(tmp_path)
    assert (first, nothing, said_before) == (0, None, {"word": "go on"})
    assert second == 8 if mode == "sync" else 0 < second <= 18, "nobody else has to stop in asynchronous mode"
    assert ended(tmp_path) == (3, [3.0] * SIZE), "exactly once per epoch, as if nothing had happened"
    assert "omnilearn: a worker was lost: all start again, 2 workers now (1 of 1 restarts used)" in said


def test_machines_come_and_go(tmp_path: Path) -> None:
    """Two launchers play two machines, of which the second comes late and is taken away."""
    (port,) = free_ports(1)
    meet = ("--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}")
    options = (*meet, "--rdzv-id", "job", "--rdzv-conf", "last_call_timeout=1")
    machines: list[subprocess.Popen[str]] = []

    def sizes() -> list[int]:
        return [size for size, *_ in starts(tmp_path)]

    try:
        machines.append(launch(tmp_path, *options, script=("machines", 0, "sync")))
        wait_for("the first machine to train alone", lambda: sizes() == [1], SECONDS)
        machines.append(launch(tmp_path, *options, script=("machines", 0, "sync")))
        wait_for("both to begin", lambda: sizes() == [1, 2], SECONDS)
        saved = os.stat(tmp_path / "checkpoint.pt").st_mtime_ns
        wait_for("both to train", lambda: os.stat(tmp_path / "checkpoint.pt").st_mtime_ns > saved, SECONDS)
        machines[1].kill()  # its worker ends with it
        wait_for("the first machine to go on", lambda: sizes() == [1, 2, 1], SECONDS)
        (tmp_path / "enough").touch()
        _, said = machines[0].communicate(timeout=SECONDS)
    finally:
        for machine in machines:
            machine.kill()
            machine.communicate()
        remove_stale()  # as the next start on a machine that is there again
    assert machines[0].returncode == 0, said
    first, second, third = (step for _, step, _ in starts(tmp_path))
    assert 0 == first < second < third
    epochs, used = ended(tmp_path)
    assert used == [float(epochs)] * SIZE, "exactly once per epoch, whoever was there"
    assert "the machines changed: all start again, 2 workers now (0 of 3 restarts used)" in said
    kept = sorted(folder.name for folder in (tmp_path / "logs" / "logs").glob("*/attempt_*"))
    assert kept.count("attempt_0") == 2, "one of each machine"
    assert kept.count("attempt_0-1") == 1, "of the first machine's first start, which no failure ended"
    assert "a worker was lost: all start again, 1 worker now (1 of 3 restarts used)" in said


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, *rest = json.loads(sys.argv[1])
    train(Path(where), *rest)
