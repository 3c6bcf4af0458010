"""The mechanisms for real: shares measured by CPU time, limits read back, changes seen, all gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_helpers import SPIN, leftovers, needs_groups, needs_network, usage
from tests.waiting import gone, wait_for

from omnilearn.cluster import cgroup
from omnilearn.cluster.emulation import Change, Emulation, Worker
from omnilearn.cluster.emulator import Emulator, remove_stale
from omnilearn.errors import InfeasibleError, UsageError

SPINNER = [sys.executable, "-S", "-c", SPIN.format(seconds=60)]


@contextmanager
def spinning(emulator: Emulator) -> Iterator[list[int]]:
    """Every worker busy; the pids."""
    workers = [
        subprocess.Popen(emulator.command(k, SPINNER), start_new_session=True) for k in range(emulator.emulation.nproc)
    ]
    try:
        wait_for("all workers to be in their place", lambda: all(emulator.pids(k) for k in range(len(workers))))
        yield [worker.pid for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)


def emulate(*cpu: float, changes: tuple[Change, ...] = ()) -> Emulation:
    return Emulation("test", tuple(Worker(cpu=share) for share in cpu), changes)


def test_workers_that_start_again_are_others() -> None:
    """Those before them are ended, and not looked for once their pids may be somebody else's."""
    with Emulator(emulate(0.3, 0.6), by="throttle") as emulator:
        with spinning(emulator) as pids:
            emulator.start_again()
            assert [emulator.pids(k) for k in range(2)] == [[], []]
            gone(pids)
        with spinning(emulator) as pids:
            assert [emulator.pids(k) for k in range(2)] == [[pid] for pid in pids]
            slow, fast = usage(pids, 1.0)
        assert slow < 0.45
        assert fast > 1.3 * slow


@needs_groups
def test_quota_gives_each_worker_its_share() -> None:
    said: list[str] = []
    with Emulator(emulate(0.1, 0.5), say=said.append) as emulator, spinning(emulator) as pids:
        assert emulator.mechanism == "cgroup"
        slow, fast = usage(pids, 1.0)
    assert slow < 0.2
    assert fast > 2.0 * slow
    assert said == ["emulating test: 0.1, 0.5 cores (CPU by control groups)"]


@needs_groups
def test_changes_at_a_second_and_at_a_step_and_at_once() -> None:
    changes = (
        Change(((0, Worker(cpu=0.6)),), at_second=0.3),
        Change(((1, Worker(cpu=0.05)),), at_step=20),
    )
    said: list[str] = []
    with Emulator(emulate(0.05, 0.6, changes=changes), say=said.append) as emulator, spinning(emulator) as pids:
        groups = emulator._groups
        assert (groups[0].cpu, groups[1].cpu) == (0.05, 0.6)
        wait_for("the change at 0.3 s", lambda: groups[0].cpu == 0.6, 10)
        assert groups[1].cpu == 0.6
        fd = os.open(emulator.environment(1)["OMNILEARN_PROGRESS"], os.O_WRONLY)
        os.pwrite(fd, (19).to_bytes(8, "little"), 0)
        assert [worker.cpu for worker in emulator.limits] == [0.6, 0.6]
        os.pwrite(fd, (20).to_bytes(8, "little"), 0)
        os.close(fd)
        wait_for("the change at step 20", lambda: groups[1].cpu == 0.05, 10)
        fast, slow = usage(pids, 0.7)
        assert fast > 2.5 * slow
        emulator.change(cpu=[0.05, 0.6])
        assert (groups[0].cpu, groups[1].cpu) == (0.05, 0.6)
        slow, fast = usage(pids, 0.7)
        assert fast > 2.5 * slow
        with pytest.raises(InfeasibleError):
            emulator.change(cpu=[0.05, 6000])
        with pytest.raises(UsageError):
            emulator.change(cpu=[0.05])
    assert said[1:] == ["emulation at 0.3 s: worker 0: 0.6 cores", "emulation at step 20: worker 1: 0.05 cores"]


@needs_groups
def test_memory_limit_kills_the_one_that_is_over_it() -> None:
    emulation = Emulation("test", (Worker(memory=100_000_000), Worker(memory=1_000_000_000)))
    code = "b = bytearray(300_000_000); print(len(b))"
    with Emulator(emulation) as emulator:
        commands = [emulator.command(k, [sys.executable, "-c", code]) for k in range(2)]
        done = [subprocess.run(command, capture_output=True, timeout=60) for command in commands]
        assert done[0].returncode == -signal.SIGKILL
        assert done[1].stdout == b"300000000\n"
        assert emulator.out_of_memory(0)
        assert not emulator.out_of_memory(1)
        emulator.start_again()
        assert not emulator.out_of_memory(0), "not those that come after"
        emulator.change(worker=0, memory=1_000_000_000)
        assert subprocess.run(commands[0], capture_output=True, timeout=60).returncode == 0


def test_throttle_gives_each_worker_its_share_and_lets_go() -> None:
    with Emulator(emulate(0.1, 0.5), by="throttle") as emulator, spinning(emulator) as pids:
        assert emulator.mechanism == "throttle"
        slow, fast = usage(pids, 1.0)
        assert slow < 0.25
        assert fast > 2.0 * slow
        emulator.change(cpu=[0.5, 0.1])
        fast, slow = usage(pids, 1.0)
        assert fast > 2.0 * slow
        emulator.close()
        state = Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[0]
        assert state != "T"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_affinity_pins_to_different_cores() -> None:
    with Emulator(emulate(1.0, 1.0), by="affinity") as emulator:
        code = "import os; print(sorted(os.sched_getaffinity(0)))"
        seen = [
            subprocess.check_output(emulator.command(k, [sys.executable, "-c", code]), timeout=30) for k in range(2)
        ]
    assert len(set(seen)) == 2
    with pytest.raises(UsageError, match="at least 1 core"):
        Emulator(emulate(0.5, 1.0), by="affinity").prepare()


def test_without_rights_the_throttle_is_chosen_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "parents", lambda controllers: {})
    said: list[str] = []
    with Emulator(emulate(0.1, 0.5), say=said.append) as emulator:
        assert emulator.mechanism == "throttle"
    assert "stopping and continuing" in said[0]
    with pytest.raises(UsageError, match="run as root"):
        Emulator(emulate(0.5), by="cgroup").prepare()
    with pytest.raises(UsageError, match="leave memory out"):
        Emulator(Emulation("test", (Worker(memory=10**9),))).prepare()


def test_mps_without_a_card_is_refused_with_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UsageError, match="CUDA MPS"):
        Emulator(Emulation("test", (Worker(mps=50),))).prepare()


DAEMON = """#!/bin/sh
if [ "$1" = -d ]; then touch "$CUDA_MPS_PIPE_DIRECTORY/control"; else cat > "{told}"; fi
"""


def test_a_daemon_shares_the_card_and_is_asked_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a daemon that only notes what it is told: there is no card here."""
    daemon, told = tmp_path / "nvidia-cuda-mps-control", tmp_path / "told"
    daemon.write_text(DAEMON.format(told=told))
    daemon.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with Emulator(Emulation("test", (Worker(mps=12.5), Worker(cpu=0.5)))) as emulator:
        assert emulator.how.endswith("card by CUDA MPS")
        place = emulator.environment(0)["CUDA_MPS_PIPE_DIRECTORY"]
        assert (Path(place) / "control").exists()
        assert emulator.environment(0)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12.5"
        assert emulator.environment(0)["CUDA_VISIBLE_DEVICES"] == "3"
        assert "CUDA_MPS_PIPE_DIRECTORY" not in emulator.environment(1)
        assert not told.exists()
    assert told.read_text().startswith("quit")
    assert not Path(place).exists()


@needs_groups
def test_more_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="worker 1 of emulation 'test' gets 1e\\+06GB of memory"):
        Emulator(Emulation("test", (Worker(memory=10**9), Worker(memory=10**15)))).prepare()


def test_a_card_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnilearn.cluster.emulator.has_card", lambda: False)
    with pytest.raises(UsageError, match="workers on a card, and there is none here"):
        Emulator(Emulation("test", (Worker(device="cuda"),))).prepare()


def test_pinning_says_what_it_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "parents", lambda controllers: {})
    with Emulator(emulate(1.8)) as emulator:
        assert emulator.how.startswith("CPU by pinning to cores [[")
        assert emulator.how.endswith(", whole ones instead of 1.8; control groups need root")


def test_environment_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    workers = (Worker(cpu=0.2), Worker(cpu=1.7, device="cpu"))
    later = (Change(((0, Worker(cpu=2.4)),), at_step=9),)
    with Emulator(Emulation("test", workers, later), by="throttle") as emulator:
        assert emulator.environment(0)["OMP_NUM_THREADS"] == "2"
        assert emulator.environment(1)["OMP_NUM_THREADS"] == "1"
        assert emulator.environment(1)["OMNILEARN_DEVICE"] == "cpu"
        code = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['OMNILEARN_EMULATE'])"
        seen = subprocess.check_output(emulator.command(1, [sys.executable, "-c", code]), text=True, timeout=30)
        assert seen.startswith("1 test: ")
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        assert "OMP_NUM_THREADS" not in emulator.environment(1)


@needs_groups
def test_close_ends_what_still_runs_and_can_be_repeated() -> None:
    emulator = Emulator(emulate(0.5))
    emulator.prepare()
    worker = subprocess.Popen(emulator.command(0, SPINNER))
    wait_for("the worker to be in its group", lambda: emulator.pids(0))
    emulator.close()
    assert worker.wait(10) == -signal.SIGKILL
    emulator.close()
    assert not leftovers()


@needs_groups
@needs_network
def test_what_a_killed_process_left_is_removed_at_the_next_start() -> None:
    code = (
        "import time\n"
        "from omnilearn.cluster.emulation import *\n"
        "from omnilearn.cluster.emulator import *\n"
        "w = (Worker(cpu=0.2, memory=10**9, bandwidth=10**8),)\n"
        "Emulator(Emulation('test', w)).prepare(); print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    process.wait(10)
    process.stdout.close()
    left = " ".join(leftovers())
    for part in ("/sys/fs/cgroup", "/netns/omnilearn-", "/tmp/omnilearn-", "ol"):
        assert part in left
    remove_stale()
    assert not leftovers()
