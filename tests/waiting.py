"""Waiting with a reason and a limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil


def wait_for(what: str, condition: Callable[[], object], timeout: float = 30.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout:g} s in vain for {what}"
        time.sleep(0.01)


def gone(numbers: Sequence[int]) -> None:
    """Wait for these processes to end."""
    wait_for(f"processes {numbers} to end", lambda: not any(map(_alive, numbers)), 10)


def _alive(pid: int) -> bool:
    try:  # where process 1 does not reap, a dead orphan stays a zombie
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
