"""CUDA MPS: a daemon of our own that lets workers share a card, each with a percentage of its
multiprocessors.

The daemon's pipes and logs live in the emulation's own folder, so that it meets no other daemon on the
machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from omnilearn.errors import UsageError

CONTROL = "nvidia-cuda-mps-control"


def unavailable() -> str:
    """Why MPS cannot be used here; "" if it can."""
    if shutil.which(CONTROL) is None:
        return f"a share of a card needs CUDA MPS, but the command {CONTROL!r} is not here"
    return ""


class Mps:
    """The daemon, its pipes below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "mps"
        self._folder.mkdir(mode=0o700)
        done = subprocess.run(
            [CONTROL, "-d"],
            env={**os.environ, **self._places},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
        if done.returncode:
            raise UsageError(f"{CONTROL} -d failed: {done.stderr.strip() or done.stdout.strip()}")

    @property
    def _places(self) -> dict[str, str]:
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self._folder), "CUDA_MPS_LOG_DIRECTORY": str(self._folder)}

    def environment(self, percent: float) -> dict[str, str]:
        """What a worker needs to be given ``percent`` of the first visible card."""
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{percent:g}", "CUDA_VISIBLE_DEVICES": card}
        return {**self._places, **share}


def quit_daemon(folder: Path) -> None:
    """Ask the daemon with its pipes in ``folder`` to end, if there is one."""
    if not (folder / "control").exists() or unavailable():
        return
    subprocess.run(
        [CONTROL],
        input="quit -t 1\n",
        env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(folder)},
        capture_output=True,
        text=True,
        timeout=30,
    )
