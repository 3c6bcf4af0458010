"""What the cluster tests share: looking for leftovers, starting the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from omnilearn.cluster import cgroup, netns
from omnilearn.cluster.owner import PREFIX, is_stale, is_stale_link

needs_groups = pytest.mark.skipif(
    set(cgroup.parents(["cpu", "memory"])) != {"cpu", "memory"},
    reason="no control group can be made here (needs root)",
)
needs_network = pytest.mark.skipif(bool(netns.unavailable()), reason=netns.unavailable() or "-")

SPIN = "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"


def leftovers() -> list[str]:
    """Control groups, namespaces, links and folders of this process or of dead ones."""
    names = [str(group) for group in cgroup.all_groups(PREFIX)]
    names += [str(space) for space in netns.FOLDER.glob(f"{PREFIX}*")]
    names += [str(folder) for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")]
    mine = f"{PREFIX}{os.getpid()}-"
    found = [name for name in names if is_stale(Path(name).name) or Path(name).name.startswith(mine)]
    ours = f"ol{os.getpid():x}."
    return found + [link for link in netns._links() if is_stale_link(link) or link.startswith(ours)]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def usage(pids: Sequence[int], seconds: float) -> list[float]:
    """Cores each process used over ``seconds`` of wall time."""
    before, start = [cpu_seconds(pid) for pid in pids], time.monotonic()
    time.sleep(seconds)  # the measurement itself, not a wait for anything
    after, wall = [cpu_seconds(pid) for pid in pids], time.monotonic() - start
    return [(b - a) / wall for a, b in zip(before, after, strict=True)]


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """``omnilearn run …`` in ``folder``, its output captured."""
    return subprocess.Popen(
        [sys.executable, "-m", "omnilearn", "run", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str, timeout: float = 60.0, **environment: str) -> tuple[int, str, str]:
    process = start(folder, *arguments, **environment)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate(timeout=30)
        pytest.fail(f"omnilearn run {arguments} did not end within {timeout:g} s:\n{out}\n{err}")
    return process.returncode, out, err
