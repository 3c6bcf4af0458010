"""Fixtures for all tests: a test that leaves a process or a thread behind fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a child process or a non-daemon thread behind."""
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}
    threads = set(threading.enumerate())
    yield
    children = [child for child in me.children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(children, timeout=5)
    left = [f"{child.pid} {' '.join(child.cmdline())[:120]}" for child in alive if child.is_running()]
    for child in alive:
        child.kill()
    assert not left, f"processes left behind: {left}"
    stray = [t.name for t in set(threading.enumerate()) - threads if not t.daemon and t.is_alive()]
    assert not stray, f"threads left behind: {stray}"
