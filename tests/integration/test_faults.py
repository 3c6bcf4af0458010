"""Bad luck: one rank fails, dies, freezes or computes nonsense; all others stop or decide alike, within seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.nn import functional as F

from omnilearn import OmniLearn
from tests.faults import Faults
from tests.gang import Gang, WorkerError
from tests.integration.common import Script, blobs, equal, mlp, snapshot

ROOT = Path(__file__).parents[2]
SECONDS = 20.0
"""Within which all must have stopped; a quiet machine needs about one (five where nobody could leave a note)."""


def train(kind: str, rank: int, mark: str, plans: list[list[int]], timeout: float = 600) -> None:
    """A user's script; run as a process of its own."""
    faults = Faults(kind, rank, 4, mark)
    omni = OmniLearn(12, policy=Script(plans, 2), timeout=timeout)
    model, opt = omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        for x, y in omni.loader(blobs()):
            omni.backward(faults(F.cross_entropy(model(x), y)))
            opt.step()
            opt.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(*json.loads(sys.argv[1]))


def start(size: int, *args: Any) -> tuple[TCPStore, list[subprocess.Popen[str]]]:
    """Bare processes, as torchrun starts them, without an agent that would end them when one fails."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = {
        "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.integration.test_faults", json.dumps(args)]
    return store, [
        subprocess.Popen(command, env={**os.environ, **settings, "RANK": str(rank)}, cwd=ROOT, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(size)
    ]  # fmt: skip


def watch(size: int, faults: Faults, plans: list[list[int]], timeout: float = 600) -> list[str]:
    """What each rank had to say when it stopped."""
    store, processes = start(size, faults.kind, faults.rank, str(faults.mark), plans, timeout)
    try:
        deadline = time.monotonic() + 90
        while not faults.fired:
            assert time.monotonic() < deadline, "the fault did not fire"
            assert any(p.poll() is None for p in processes), [p.communicate()[1] for p in processes]
            time.sleep(0.05)
        said = []
        for rank, process in enumerate(processes):
            if faults.kind == "freeze" and rank == faults.rank:
                said.append("")
                continue
            left = faults.when + SECONDS + min(timeout, 60) - time.time()
            said.append(process.communicate(timeout=max(left, 1))[1])
            assert process.returncode != 0
        return said
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.communicate()
        del store


UNIFORM = [[4, 4, 4]]
PARKED = [[4, 4, 4], [6, 6, 0]]


@pytest.mark.parametrize("plans", [UNIFORM, PARKED])
def test_an_error_in_one_rank_stops_all_and_is_named(tmp_path: Path, plans: list[list[int]]) -> None:
    faults = Faults("exception", 0, 4, tmp_path / "mark")
    said = watch(3, faults, plans, 60)
    assert faults.fired
    assert "InjectedError: disk on fire" in said[0]
    for text in said[1:]:
        assert "PeerFailure: rank 0 failed" in text, text
        assert "disk on fire" in text


def test_a_killed_rank_stops_all(tmp_path: Path) -> None:
    faults = Faults("kill", 1, 4, tmp_path / "mark")
    said = watch(3, faults, PARKED, 60)
    assert faults.fired
    for rank in (0, 2):
        assert "PeerFailure" in said[rank], said[rank]


def test_a_frozen_rank_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    faults = Faults("freeze", 1, 4, tmp_path / "mark")
    said = watch(2, faults, [[6, 6]], timeout=3)
    assert faults.fired
    assert "PeerFailure" in said[0], said[0]
    assert "imed out" in said[0] or "imeout" in said[0], said[0]


def test_under_the_launcher_the_culprit_is_shown(tmp_path: Path) -> None:
    faults = Faults("exception", 1, 4, tmp_path / "mark")
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, torch\ntorch.set_num_threads(1)\n"
        "from tests.integration.test_faults import train\ntrain(*json.loads(sys.argv[1]))\n"
    )
    job = json.dumps(["exception", 1, str(faults.mark), [[6, 6]]])
    command = [
        sys.executable,
        "-m",
        "omnilearn",
        "run",
        "--nproc",
        "2",
        "--log-dir",
        str(tmp_path / "logs"),
        str(script),
        job,
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, text=True, capture_output=True, timeout=120
    )
    assert faults.fired
    assert done.returncode == 1
    assert "rank 1" in done.stderr + done.stdout
    assert "disk on fire" in done.stderr + done.stdout
    assert time.time() - faults.when < SECONDS


# Non-finite


def with_a_fault(kind: str, mark: str, nonfinite: str, micro: int | None = None) -> Any:
    faults = Faults(kind, 1, 4, mark)
    with OmniLearn(12, policy=Script([[5, 7]]), nonfinite=nonfinite, micro_batch=micro) as omni:
        model, opt = omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        states = []
        for x, y in omni.loader(blobs()):
            omni.backward(faults(F.cross_entropy(model(x), y)))
            opt.step()
            opt.zero_grad()
            states.append(snapshot(model))
        return states, omni.skipped


def test_a_nan_raises_on_all_ranks_and_names_the_one(gang: Gang, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(WorkerError) as raised:
        gang.run(2, with_a_fault, "nan", str(mark), "raise")
    assert Faults("nan", 1, 4, mark).fired
    assert set(raised.value.errors) == {0, 1}
    for kind, text in raised.value.errors.values():
        assert kind == "NonFiniteError"
        assert "step 3 is not finite" in text
        assert "rank 1: nan" in text


@pytest.mark.parametrize("micro", [None, 4])
def test_a_nan_can_be_skipped(gang: Gang, tmp_path: Path, micro: int | None) -> None:
    mark = tmp_path / "mark"
    results = gang.run(2, with_a_fault, "nan", str(mark), "skip", micro)
    assert Faults("nan", 1, 4, mark).fired
    assert [skipped for _, skipped in results] == [1, 1]
    states = results[0][0]
    assert all(torch.isfinite(t).all() for t in states[-1])
    assert equal(results[0][0][-1], results[1][0][-1])
    unchanged = [i for i in range(1, len(states)) if equal(states[i - 1], states[i])]
    assert unchanged == [3] if micro is None else len(unchanged) > 1


def test_a_slow_step_is_no_fault(gang: Gang, tmp_path: Path) -> None:
    results = gang.run(2, with_a_fault, "slow", str(tmp_path / "mark"), "raise")
    assert Faults("slow", 1, 4, tmp_path / "mark").fired
    assert equal(results[0][0][-1], results[1][0][-1])
