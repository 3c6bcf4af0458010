"""The command line: a newcomer understands its help, and wrong use gets a clear message and exit code 2."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import omnilearn
from omnilearn import cli
from omnilearn.errors import InfeasibleError, OmniLearnError


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omnilearn", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_is_understandable() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for name, (_, summary) in cli.COMMANDS.items():
        assert name in done.stdout
        assert summary in done.stdout
    for word in ("usage: omnilearn", "start here:", "exit codes", "--version", "batch size"):
        assert word in done.stdout


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"omnilearn {omnilearn.__version__}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["--fast"], "required: COMMAND"),
        (["bench", "control", "--no-such-option"], "--no-such-option"),
    ],
)
def test_wrong_use(words: list[str], message: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "usage: omnilearn" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_command_is_answered_with_the_known_ones() -> None:
    done = run("trian")
    assert all(name in done.stderr for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InfeasibleError("global_batch 0 is too small"), 2, "omnilearn: global_batch 0 is too small"),
        (OmniLearnError("rank 1 failed"), 1, "omnilearn: rank 1 failed"),
        (KeyboardInterrupt(), 130, "omnilearn: interrupted"),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from omnilearn.bench import command

    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(command, "main", fail)
    assert cli.main(["bench", "control"]) == code
    assert capsys.readouterr().err.strip() == message


def test_an_unforeseen_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from omnilearn.bench import command

    monkeypatch.setattr(command, "main", lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["bench", "control"])


def test_the_installed_command_is_the_same() -> None:
    installed = Path(sys.executable).with_name("omnilearn")
    assert shutil.which(str(installed)), "the package is installed with its command (make setup)"
    done = subprocess.run([installed, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == f"omnilearn {omnilearn.__version__}"
