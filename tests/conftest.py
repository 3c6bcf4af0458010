"""Fixtures for all tests: a test that leaves a process or a thread behind fails."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from tests.gang import Gang

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    # A shell starts background jobs so, and what tests start would ignore their Ctrl-C, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_kept: set[int] = set()  # processes that outlive a test on purpose
_OF_THE_MACHINE = (
    "cluster/", "bench/test_bench_runs", "test_demo", "integration/test_memory", "integration/test_restart",
    "observe/test_top",
)  # fmt: skip
"""Tests that emulate clusters and look at what is left of them: one after the other."""


def _group(path: str) -> str:
    """Files that share processes, or the machine, stay together where tests run side by side."""
    path = path.removeprefix("tests/")
    return "machine" if path.startswith(_OF_THE_MACHINE) else "tensorflow" if path.startswith("tensorflow/") else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``make test``: one group of files after the other, the long ones first."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return ByGroup(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        group = _group(item.nodeid.partition("::")[0])
        return ("machine", "tensorflow", group).index(group)

    items.sort(key=place)


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
