"""Watching: ``omnilearn top``, which run is meant, and the view beside a run on a real (pseudo-)terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console
from tests.observe.made import async_run, sync_run

from omnilearn import cli
from omnilearn.errors import UsageError
from omnilearn.observe import EventLog
from omnilearn.observe.live import LiveView
from omnilearn.observe.runs import find


def test_the_last_run_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no runs below runs/"):
        find(None)
    for age, name in ((30, "a"), (10, "demo/omni"), (20, "z")):
        folder = sync_run(tmp_path / "runs" / name, 1, 10)
        os.utime(folder / "rank-0.jsonl", (time.time() - age,) * 2)
    assert find(None) == Path("runs/demo/omni")
    assert find("a") == Path("runs/a")
    assert find("runs/demo") == Path("runs/demo/omni")
    with pytest.raises(UsageError, match="no folder b: give the log folder"):
        find("b")


def test_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(sync_run(tmp_path, 4, 400, park=True)), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "parked" in shown
    assert re.search(r"worker +has +batch", shown)
    assert "× as fast as equal batches (predicted)" in " ".join(shown.split())
    assert "loss 0." in shown


def test_it_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(async_run(tmp_path, 2, 5.0))]) == 0
    shown = capsys.readouterr().out
    assert "staleness" in shown
    assert "\x1b" not in shown
    assert cli.main(["top", str(tmp_path / "missing")]) == 2


def test_time_left(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    log.write("run", mode="sync", options={"global_batch": 8}, workers=[{"cores": 1, "device": "cpu"}])
    log.write("plan", step=0, batches=[8], parked=[], reason="start")
    log.write("epoch", epoch=0, step=0, steps=110)
    log.write("steps", step=0, batch=[8] * 10, busy=[0.0, *[0.9] * 9], wait=[0.0, *[0.1] * 9])
    log.close()
    view = LiveView(tmp_path, "run", console=Console(file=io.StringIO(), width=200))
    view.update(show=False)
    assert "epoch 1 (9%), step 10, 8 samples/s, 1:40 min left of the epoch" in view.line()
    view.epochs = 3
    assert "at most 5:20 min left" in view.line()


def test_many_workers_fit_on_the_screen(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100, height=24, force_terminal=True, legacy_windows=False, record=True)
    view = LiveView(sync_run(tmp_path, 64, 100), "run", console=console)
    view.update(show=False)
    console.print(view.render())
    lines = console.export_text().splitlines()
    assert len(lines) <= 24
    assert any("more" in line and "…" in line for line in lines)


SCRIPT = """
import os, sys, time
sys.path.insert(0, {source!r})
from omnilearn.observe import EventLog
rank = int(os.environ["RANK"])
log = EventLog(os.environ["OMNILEARN_LOG_DIR"], rank)
if rank == 0:
    log.write("run", mode="sync", options={{"global_batch": 8}}, workers=[{{"cores": 1.5, "device": "cpu"}}] * 2)
    log.write("plan", step=0, batches=[5, 3], parked=[], reason="start")
for step in range(6):
    log.write("steps", step=step, batch=[4], busy=[0.1], wait=[0.1])
    print("step", step, flush=True)
    time.sleep(0.2)
log.write("end", ok=True)
"""


def test_beside_a_run_on_a_terminal(tmp_path: Path) -> None:
    """The workers' lines and the view share a terminal, and the run ends."""
    import omnilearn

    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(source=str(Path(omnilearn.__file__).parents[1])))
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    command = [
        sys.executable,
        "-m",
        "omnilearn",
        "run",
        "--nproc",
        "2",
        "--log-dir",
        str(tmp_path / "log"),
        str(script),
    ]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}, cwd=tmp_path
    )
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([mine], [], [], 0.2)[0]:
                try:
                    shown += os.read(mine, 65536)
                except OSError:  # the other end is closed
                    break
            elif process.poll() is not None:
                break
        assert process.wait(10) == 0
    finally:
        process.kill()
        os.close(mine)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    for rank in range(2):
        for step in range(6):
            assert len(re.findall(rf"\[rank {rank}\] step {step}\b", text)) == 1
    assert re.search(r"0 +1\.5 cores +5 +█+░+ +20", text)
    assert "plan: first plan" in text
