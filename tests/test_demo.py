"""The demo: for real in its quick form, its words for whatever may have happened, and its ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from omnilearn import cli
from omnilearn.demo import command, story
from omnilearn.observe import read

CORES = (0.225, 0.225, 0.15, 1.2)
DDP = story.Run("Plain DDP, equal batches", True, 24.0, 0.972, 6, 346, (32,) * 4, (), (0.4, 0.4, 0.1, 0.83))
OMNI = story.Run("OmniLearn", True, 10.0, 0.972, 6, 772, (0, 0, 0, 128), (0, 1, 2), (0.1, 0.1, 0.1, 0.0))


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "omnilearn", "demo", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )


def left_behind() -> set[str]:
    """Control groups and folders of emulations whose launcher is gone; tests beside this one may have others."""
    from omnilearn.cluster import cgroup
    from omnilearn.cluster.owner import PREFIX, is_stale

    found = [*cgroup.all_groups(PREFIX), *Path("/tmp").glob(f"{PREFIX}*")]
    return {str(path) for path in found if is_stale(path.name)}


def workers_of(folder: Path) -> list[int]:
    """Processes that work for a demo in this folder."""
    everybody = psutil.process_iter(["cmdline"])
    return [p.pid for p in everybody if any(str(folder) in word for word in p.info["cmdline"] or ())]


@pytest.mark.timeout(150)
def test_quick_for_real(tmp_path: Path) -> None:
    began = time.monotonic()
    process = start(tmp_path, "--quick", "--json", "numbers/demo.json")
    out, err = process.communicate(timeout=140)
    took = time.monotonic() - began
    assert process.returncode == 0, out + err
    assert err == ""
    assert "\x1b" not in out
    for word in ("unequal workers (HL8)", "Plain DDP", "OmniLearn", "time to 93% right", "parked at the end"):
        assert word in out
    assert max(len(line.rstrip()) for line in out.splitlines() if line[:2] not in ("1.", "2.")) <= 80
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"runs/{folder.name}" in out
    assert not (folder / "digits.pt").exists()

    numbers = json.loads((tmp_path / "numbers" / "demo.json").read_text())
    assert numbers == json.loads((folder / "summary.json").read_text())
    ddp, omni = numbers["rows"]
    assert ddp["batches"] == [32] * 4
    assert sum(omni["batches"]) == 128
    assert ddp["reached"]
    assert omni["reached"]
    # The same samples in the same order, exact gradients: the same accuracy after each epoch, up to rounding.
    assert ddp["epochs"] == omni["epochs"]
    accuracies = [
        [event["accuracy"] for event in read(folder / name) if event["kind"] == "metric"] for name in ("ddp", "omni")
    ]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.01)
    assert ddp["waited"][3] > 0.5, "the fastest worker waits in plain DDP"
    page = (folder / "report.html").read_text()
    assert f"runs/{folder.name}/report.html" in out
    assert all(f"<h3>{name}</h3>" in page for name in ("ddp", "omni"))
    assert "Side by side" in page
    kinds = {(event["kind"], event["rank"]) for event in read(folder / "omni")}
    assert {("run", 0), ("plan", 0), ("epoch", 0), ("metric", 0)} < kinds
    assert {(kind, rank) for kind in ("steps", "end") for rank in range(4)} < kinds
    assert not workers_of(tmp_path)
    assert took < 60 or os.getloadavg()[0] > 3, f"{took:.0f} s"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    before = left_behind()
    process = start(tmp_path, "--quick")
    deadline = time.monotonic() + 60
    while len(workers_of(tmp_path)) < 5:  # the launcher and its four workers
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "all workers were ended" in err
    assert "Traceback" not in err + out
    assert not workers_of(tmp_path)
    assert left_behind() <= before


def test_a_failing_run_is_shown_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_write_digits", lambda path: path.write_bytes(b"no digits"))
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["demo", "--quick"]) == 1
    err = capsys.readouterr().err  # type: ignore[attr-defined]
    assert "'Plain DDP, equal batches' failed (exit code 1)" in err
    assert "UnpicklingError" in err
    assert not workers_of(tmp_path)


def test_missing_scikit_learn_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == "sklearn" else object())
    assert cli.main(["demo"]) == 2
    assert "the demo needs scikit-learn: pip install -e '.[demo]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--emulate", "HL9"], "unknown level 'HL9'"),
        (["--emulate", "1"], "one worker alone"),
        (["--emulate", "mps=50,50"], "the demo trains on CPUs"),
        (["--epochs", "0"], "at least 1"),
        (["--mode", "later"], "invalid choice: 'later'"),
    ],
)
def test_wrong_use(tmp_path: Path, words: list[str], message: str) -> None:
    process = start(tmp_path, *words)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert message in err
    assert not list(tmp_path.iterdir())


# The words


def conclusion(ddp: story.Run, omni: story.Run, cores: tuple[float, ...] = CORES) -> str:
    return story.conclusion(ddp, omni, cores, 0.97)


def test_parking_is_explained() -> None:
    said = conclusion(DDP, OMNI)
    assert "2.4 times as fast as plain DDP to the same accuracy (the same samples in the same order, 6 epochs)" in said
    assert "worker 3 (1.2 cores) waited for 83% of its time" in said
    assert "left everything to worker 3 and parked workers 0, 1 and 2: with so small a network" in said


def test_balancing_is_explained() -> None:
    said = conclusion(DDP, replace(OMNI, batches=(16, 16, 10, 86), parked=()))
    assert "gave worker 3 86 of the 128 digits of a step and worker 2 only 10" in said
    said = conclusion(DDP, replace(OMNI, batches=(16, 16, 0, 96), parked=(2,)))
    assert "shared the work among workers 0, 1 and 3, by their speed, and parked worker 2" in said
    assert "waiting for it costs more than it can contribute" in said


def test_what_did_not_work_is_said() -> None:
    slow = replace(DDP, reached=False, seconds=45.0, accuracy=0.91)
    said = conclusion(slow, OMNI)
    assert "plain DDP was stopped after 45 s at 91.0%" in said
    assert "2.2 times as many digits per second" in said
    assert "not within 45 s" in str(story.table([slow, OMNI], 0.97))
    assert "OmniLearn took 2.4 times as long" in conclusion(replace(DDP, seconds=10.0), replace(OMNI, seconds=24.0))
    assert "busy with other work?" in conclusion(replace(DDP, seconds=10.0), replace(OMNI, seconds=24.0))
    assert "OmniLearn did not reach 97%" in conclusion(DDP, replace(OMNI, reached=False))
    assert "Neither reached 97%" in conclusion(slow, replace(OMNI, reached=False))


def test_equal_workers_have_nothing_to_gain() -> None:
    said = conclusion(DDP, replace(DDP, title="OmniLearn"), (0.45,) * 4)
    assert "about the same time" in said
    assert "nothing to gain" in said


def test_other_epochs_are_not_called_the_same() -> None:
    assert "same samples" not in conclusion(DDP, replace(OMNI, epochs=7))
