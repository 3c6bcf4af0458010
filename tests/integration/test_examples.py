"""Every example is run for real, alone and with two workers, and stays as short as it promises."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
ELSEWHERE = {"checkpoint", "memory", *(name for name in NAMES if name.startswith("tensorflow"))}
"""Run by tests of their own."""


def launch(tmp_path: Path, name: str, *arguments: str, workers: int, restarts: int = 0) -> str:
    script = [str(EXAMPLES / f"{name}.py"), *arguments]
    options = ["--nproc", str(workers), "--max-restarts", str(restarts), "--log-dir", str(tmp_path / "log")]
    launcher = ["-m", "omnilearn", "run", *options] if workers else []
    done = subprocess.run(
        [sys.executable, *launcher, *script],
        cwd=tmp_path,
        # Some virtual machines announce matrix instructions that they do not execute (oneDNN, bfloat16).
        env={**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ddp_to_omnilearn_changes_at_most_seven_lines() -> None:
    def code(name: str) -> list[str]:
        text = (EXAMPLES / f"{name}.py").read_text()
        return [line for line in text[text.index("import torch") :].splitlines() if line.strip()]

    changes = [line for line in difflib.ndiff(code("ddp"), code("omni")) if line[:2] in ("+ ", "- ")]
    assert sum(line.startswith("+ ") for line in changes) <= 7, "\n".join(changes)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ELSEWHERE])
def test_example_with_two_workers(tmp_path: Path, name: str) -> None:
    shown = launch(tmp_path, name, workers=2)
    epochs = [line for line in shown.splitlines() if "epoch" in line]
    assert len(epochs) >= 4, shown


def test_example_alone(tmp_path: Path) -> None:
    assert "epoch 4" in launch(tmp_path, "omni", workers=0)


def test_checkpoint_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = launch(tmp_path, "checkpoint", "state", "15", workers=2, restarts=1)
    assert "continuing after step 10, in epoch 1" in first, "the worker that died in step 15 did not end it"
    assert "done after step 32" in first
    second = launch(tmp_path, "checkpoint", "state", workers=0)
    assert "continuing after step 30, in epoch 3" in second
    assert "done after step 32" in second


def test_examples_can_be_read_at_a_glance() -> None:
    for name in NAMES:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 50, name
