"""``omnilearn run`` as a user meets it: output, failures, interruption, wrong use, nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster_helpers import leftovers, needs_groups, needs_network, run, start
from tests.waiting import gone, wait_for

SCRIPT = """
import os, sys, time
print("hello from", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], flush=True)
open(f"pid.{os.environ['RANK']}", "w").write(str(os.getpid()))
if "boom" in sys.argv and os.environ["RANK"] == "1":
    while not all(os.path.exists(f"pid.{k}") for k in range(int(os.environ["WORLD_SIZE"]))): time.sleep(0.01)
    raise ValueError("the first error")
if "exit7" in sys.argv:
    sys.exit(7)
if "boom" in sys.argv or "wait" in sys.argv:
    time.sleep(120)
print("log dir", os.path.isdir(os.environ["OMNILEARN_LOG_DIR"]), os.environ["OMNILEARN_LOG_DIR"])
print("emulate", os.environ.get("OMNILEARN_EMULATE"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def pids(folder: Path, count: int) -> list[int]:
    """The workers' pids, once all have begun."""
    files = [folder / f"pid.{k}" for k in range(count)]
    wait_for(f"{count} workers to start", lambda: all(f.exists() and f.read_text() for f in files))
    return [int(file.read_text()) for file in files]


def test_three_ranks_with_prefixes_and_arguments(folder: Path) -> None:
    code, out, err = run(folder, "--nproc", "3", "train.py", "--lr", "0.1", "$HOME", "a$$b")
    assert code == 0, err
    for rank in range(3):
        assert f"[rank {rank}] hello from {rank} of 3 ['--lr', '0.1', '$HOME', 'a$$b']\n" in out
    logs = list((folder / "runs").iterdir())
    assert len(logs) == 1
    assert f"log dir True {logs[0]}" in out
    assert len(list(logs[0].rglob("stdout.log"))) == 3
    assert "emulate None" in out
    assert err == ""


def test_one_error_ends_all_and_is_shown_first(folder: Path) -> None:
    begin = time.monotonic()
    code, _, err = run(folder, "--nproc", "3", "--log-dir", "logs here", "train.py", "boom")
    assert code == 1
    assert time.monotonic() - begin < 40
    first, *rest = err.splitlines()
    assert first == "omnilearn: rank 1 failed first: ValueError: the first error (exit code 1)"
    assert rest[0].strip() == "Traceback (most recent call last):"
    assert rest[-1] == f"omnilearn: all workers were ended. Logs: {folder / 'logs here'}"
    assert err.count("Traceback") == 1
    gone(pids(folder, 3))


def test_the_workers_exit_code_is_ours(folder: Path) -> None:
    code, _, err = run(folder, "train.py", "exit7")
    assert code == 7
    assert "exit code 7" in err


@pytest.mark.parametrize(
    ("number", "emulate"),
    [
        (signal.SIGINT, ["--emulate", "1,2"]),
        (signal.SIGTERM, ["--emulate", "1,2", "--emulate-by", "throttle"]),
        pytest.param(signal.SIGINT, ["--emulate", "links.toml"], marks=needs_network),
    ],
)
def test_a_signal_ends_all(folder: Path, number: signal.Signals, emulate: list[str]) -> None:
    (folder / "links.toml").write_text('[[worker]]\nbandwidth = "1Gbit"\n' * 2)
    process = start(folder, *emulate, "train.py", "wait")
    workers = pids(folder, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in out + err
    assert "all workers were ended" in err
    gone(workers)
    assert not leftovers()


def test_workers_that_will_not_go_are_killed_at_the_second_signal(folder: Path) -> None:
    (folder / "stubborn.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: open('asked', 'w'))\n"
        "open('pid.0', 'w').write(str(os.getpid()))\n"
        "end = time.monotonic() + 100\n"
        "while time.monotonic() < end: time.sleep(0.1)\n"
    )
    process = start(folder, "--emulate", "cpu=0.9", "stubborn.py")
    workers = pids(folder, 1)
    process.send_signal(signal.SIGINT)
    wait_for("the worker to be asked to end", (folder / "asked").exists)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=4)
    assert process.returncode == 130, err
    gone(workers)
    assert not leftovers()


def test_a_killed_launcher_takes_its_workers_with_it_and_the_next_cleans_up(folder: Path) -> None:
    process = start(folder, "--emulate", "1,2", "train.py", "wait")
    workers = pids(folder, 2)
    process.kill()
    process.communicate(timeout=30)
    gone(workers)
    assert leftovers()
    code, out, err = run(folder, "--emulate", "cpu=0.9", "train.py")
    assert code == 0, err
    assert "emulate cpu=0.9: 0.9 cores" in out
    assert not leftovers()


@needs_groups
def test_a_worker_over_its_memory_limit_is_named(folder: Path) -> None:
    (folder / "small.toml").write_text('[[worker]]\nmemory = "200MB"\n')
    (folder / "big.py").write_text("b = bytearray(500_000_000)")
    code, _, err = run(folder, "--emulate", "small.toml", "big.py")
    assert code == 1
    assert "rank 0 failed first: out of memory, killed by the kernel at its emulated limit of 200MB" in err


def test_what_a_worker_started_does_not_outlive_it(folder: Path) -> None:
    (folder / "parent.py").write_text(
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(100)'])\n"
        "open('pid.0', 'w').write(str(p.pid))\n"
    )
    code, _, err = run(folder, "parent.py")
    assert code == 0, err
    gone(pids(folder, 1))


def test_module_and_program_instead_of_a_script(folder: Path) -> None:
    code, out, err = run(folder, "-m", "train", "x")
    assert code == 0, err
    assert "[rank 0] hello from 0 of 1 ['x']" in out
    code, out, err = run(folder, "--no-python", "echo", "plain")
    assert code == 0, err
    assert "[rank 0] plain" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "script 'nowhere.py' was not found"),
        (["-m", "nowhere_at_all"], "module 'nowhere_at_all' was not found"),
        (["--no-python", "nowhere-program"], "program 'nowhere-program' was not found"),
        (["--emulate", "HL3", "train.py"], "unknown level 'HL3'"),
        (["--nproc", "3", "--emulate", "HL8", "train.py"], "4 workers, but --nproc is 3"),
        (["--nproc", "0", "train.py"], "at least one worker"),
        (["--nproc", "many", "train.py"], "many"),
        (["--nnodes", "2", "train.py"], "--rdzv-endpoint"),
        (["--emulate", "cpu=999,999", "train.py"], "1998 cores"),
        (["--max-restarts", "1", "--emulate", "links.toml", "train.py"], "workers cannot be started again"),
        (["--log-dir", "train.py/x", "train.py"], "log folder"),
    ],
)
def test_wrong_use_is_said_before_anything_starts(
    folder: Path, arguments: list[str], words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from omnilearn.cli import main

    monkeypatch.chdir(folder)
    Path("links.toml").write_text('[[worker]]\nbandwidth = "1Gbit"\n' * 2)
    assert main(["run", *arguments]) == 2
    assert words in capfd.readouterr().err
    assert not list(folder.glob("pid.*"))


def test_help_shows_how(folder: Path) -> None:
    text = subprocess.check_output([sys.executable, "-m", "omnilearn", "run", "--help"], text=True, timeout=60)
    for word in ("--emulate SPEC", "examples:", "--rdzv-endpoint HOST:29400", "--nproc", "exit codes"):
        assert word in text
