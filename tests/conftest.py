"""Fixtures for all tests: a test that leaves a process or a thread behind fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from tests.gang import Gang

_kept: set[int] = set()  # processes that outlive a test on purpose
_OF_THE_MACHINE = ("cluster/", "bench/test_bench_runs", "test_demo", "integration/test_memory", "observe/test_top")
"""Tests that emulate clusters and look at what is left of them: one after the other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run side by side (pytest-xdist, ``make test``): files that share processes stay together."""
    here = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(here).as_posix() if item.path.is_relative_to(here) else item.path.name
        group = (
            "machine"
            if path.startswith(_OF_THE_MACHINE)
            else path.split("/test_")[0]
            if "tensorflow/" in path
            else path
        )
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a child process or a non-daemon thread behind."""
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}
    threads = set(threading.enumerate())
    yield
    children = [c for c in me.children(recursive=True) if c.pid not in before | _kept and not _is_helper(c)]
    _, alive = psutil.wait_procs(children, timeout=5)
    left = [f"{child.pid} {' '.join(child.cmdline())[:120]}" for child in alive if child.is_running()]
    for child in alive:
        child.kill()
    assert not left, f"processes left behind: {left}"
    stray = [t.name for t in set(threading.enumerate()) - threads if not t.daemon and t.is_alive()]
    assert not stray, f"threads left behind: {stray}"


def _is_helper(process: psutil.Process) -> bool:
    """Python's own resource tracker lives as long as the interpreter."""
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return True


@pytest.fixture(scope="session")
def _gang() -> Iterator[Gang]:
    from tests.gang import Gang

    gang = Gang()
    yield gang
    gang.close()


@pytest.fixture
def gang(_gang: Gang) -> Iterator[Gang]:
    """Real processes that run a function together: ``gang.run(3, function, *args)``."""
    yield _gang
    _kept.update(process.pid for process, _ in _gang._members)
