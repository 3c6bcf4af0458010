"""Control groups: what limits this process already, and groups of our own that limit a worker.

Speaks v1 and v2 (and a machine with both), by the files alone; no daemon is asked. Assumes that the mounts
are listed in ``/proc/self/mountinfo``. Which worker gets what is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from omnilearn.cluster.owner import new_name
from omnilearn.errors import UsageError

PERIOD = 10_000  # µs; the kernel's default of 100 ms makes the step times of slow workers jump
SMALLEST_QUOTA = 1_000  # µs, the kernel's own limit
UNLIMITED = 1 << 60  # v1 writes "no memory limit" as a number near 2^63


def read(path: Path) -> str:
    """The file's text, or "" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _mounts() -> Iterator[tuple[str, frozenset[str], str, Path]]:
    """(kind, controllers, root of the mount inside the hierarchy, mount point) of each cgroup hierarchy."""
    for line in read(Path("/proc/self/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            fields = left.split(" ")
            yield kind, frozenset(options.split(" ")[-1].split(",")), fields[3], Path(fields[4])


def _own(kind: str, controller: str) -> str | None:
    """This process's place in a hierarchy, as /proc/self/cgroup has it."""
    for line in read(Path("/proc/self/cgroup")).splitlines():
        number, controllers, place = line.split(":", 2)
        if (kind == "cgroup2" and number == "0") or controller in controllers.split(","):
            return place
    return None


class Hierarchy:
    """One mounted hierarchy, and where this process is in it."""

    def __init__(self, version: int, mount: Path, own: Path) -> None:
        self.version, self.mount, self.own = version, mount, own

    def path(self) -> list[Path]:
        """The group of this process and all above it, innermost first."""
        above = [place for place in self.own.parents if place.is_relative_to(self.mount)]
        return [self.own, *above]


def find(controller: str) -> Hierarchy | None:
    """The hierarchy in charge of ``controller`` ("cpu", "memory"), or None."""
    for kind, controllers, root, mount in _mounts():
        if kind == "cgroup2":
            if controller not in read(mount / "cgroup.controllers").split():
                continue
        elif controller not in controllers:
            continue
        place = _own("cgroup2" if kind == "cgroup2" else "cgroup", controller) or "/"
        inside = os.path.relpath(place, root) if place.startswith(root) else "."
        own = mount if inside == "." else mount / inside
        return Hierarchy(2 if kind == "cgroup2" else 1, mount, own if own.is_dir() else mount)
    return None


def cpu_of(group: Path) -> float | None:
    """The group's CPU quota in cores, or None where it has none."""
    words = read(group / "cpu.max").split() or [
        read(group / "cpu.cfs_quota_us"),
        read(group / "cpu.cfs_period_us"),
    ]
    if len(words) != 2 or words[0] in ("", "max", "-1") or not words[1]:
        return None
    return int(words[0]) / int(words[1])


def memory_of(group: Path) -> int | None:
    """The group's memory limit in bytes, or None where it has none."""
    word = read(group / "memory.max") or read(group / "memory.limit_in_bytes")
    return int(word) if word.isdigit() and int(word) < UNLIMITED else None


def memory_used(group: Path) -> int:
    """Bytes that count against the group's limit and cannot simply be dropped, as cached files can (0: not known)."""
    word = read(group / "memory.current") or read(group / "memory.usage_in_bytes")
    lines = (line.split() for line in read(group / "memory.stat").splitlines())
    counts = {words[0]: int(words[1]) for words in lines if len(words) == 2}
    cached = counts.get("total_inactive_file", counts.get("inactive_file", 0))
    return max(int(word) - cached, 0) if word.isdigit() else 0


def cpu_limit() -> float | None:
    """The smallest CPU quota, in cores, of this process's group and all groups above it."""
    hierarchy = find("cpu")
    limits = [cpu_of(group) for group in hierarchy.path()] if hierarchy else []
    return min((limit for limit in limits if limit is not None), default=None)


def memory_limit() -> int | None:
    """The smallest memory limit, in bytes, of this process's group and all groups above it."""
    hierarchy = find("memory")
    limits = [memory_of(group) for group in hierarchy.path()] if hierarchy else []
    return min((limit for limit in limits if limit is not None), default=None)


def parents(controllers: Sequence[str]) -> dict[str, Path]:
    """Where groups with these controllers can be made, by controller; those that can't be had are left out.

    With v1 each hierarchy has our own group for it. With v2 a process is in one group only, so all controllers
    share a place: the nearest above us that hands them down, or can be told to.
    """
    found: dict[str, Path] = {}
    shared: list[str] = []
    for controller in controllers:
        hierarchy = find(controller)
        if hierarchy is not None and hierarchy.version == 2:
            shared.append(controller)
        elif hierarchy is not None and os.access(hierarchy.own, os.W_OK):
            found[controller] = hierarchy.own
    for wanted in (shared, *([each] for each in shared)):
        place = _shared_parent(wanted) if wanted else None
        if place is not None:
            return {**found, **dict.fromkeys(wanted, place)}
    return found


def _shared_parent(controllers: Sequence[str]) -> Path | None:
    hierarchy = find(controllers[0])
    places = [place for place in hierarchy.path() if os.access(place, os.W_OK)] if hierarchy else []
    for tell in (False, True):
        for place in places:
            handed_down = place / "cgroup.subtree_control"
            missing = set(controllers) - set(read(handed_down).split())
            # A group with processes in it, as our own, cannot hand down; the root, which has no type, can.
            if missing and (not tell or (place == places[0] and (place / "cgroup.type").exists())):
                continue
            try:
                if missing:
                    handed_down.write_text(" ".join(f"+{controller}" for controller in sorted(missing)))
                if _can_hold_processes(place):
                    return place
            except OSError:
                continue
    return None


def _can_hold_processes(place: Path) -> bool:
    """Whether a group made here would take processes ("domain invalid" and "threaded" ones do not)."""
    probe = place / new_name()
    probe.mkdir()
    try:
        return read(probe / "cgroup.type") in ("domain", "")
    finally:
        probe.rmdir()


class Group:
    """One worker's group: a folder per hierarchy. Values can be changed while the worker runs."""

    def __init__(self, name: str, parents: dict[str, Path]) -> None:
        self._folders = {controller: above / name for controller, above in parents.items()}
        for folder in self._folders.values():
            folder.mkdir(exist_ok=True)

    @property
    def doors(self) -> list[str]:
        """The files a process writes its pid to, to be in the group with all it starts later."""
        return sorted({str(folder / "cgroup.procs") for folder in self._folders.values()})

    def _write(self, controller: str, file: str, value: str) -> None:
        path = self._folders[controller] / file
        try:
            path.write_text(value)
        except OSError as error:
            raise UsageError(
                f"the kernel refused {value!r} for {path} ({error.strerror}): a group above may have a "
                "smaller limit; ask for less, or use --emulate-by throttle"
            ) from error

    def set_cpu(self, cores: float) -> None:
        period = min(1_000_000, max(PERIOD, round(SMALLEST_QUOTA / cores)))
        quota = max(SMALLEST_QUOTA, round(cores * period))
        folder = self._folders["cpu"]
        if (folder / "cpu.max").exists():
            self._write("cpu", "cpu.max", f"{quota} {period}")
            return
        # v1 checks each of the two writes against the groups above: lift the quota first, then set both.
        self._write("cpu", "cpu.cfs_quota_us", "-1")
        self._write("cpu", "cpu.cfs_period_us", str(period))
        self._write("cpu", "cpu.cfs_quota_us", str(quota))

    def set_memory(self, size: int) -> None:
        folder = self._folders["memory"]
        if (folder / "memory.max").exists():
            self._write("memory", "memory.max", str(size))
            if (folder / "memory.swap.max").exists():
                self._write("memory", "memory.swap.max", "0")
            return
        both = folder / "memory.memsw.limit_in_bytes"
        if both.exists() and (memory_of(folder) or UNLIMITED) < size:
            self._write("memory", both.name, str(size))  # memory + swap may never be the smaller of the two
        self._write("memory", "memory.limit_in_bytes", str(size))
        if both.exists():
            self._write("memory", both.name, str(size))

    @property
    def cpu(self) -> float | None:
        return cpu_of(self._folders["cpu"]) if "cpu" in self._folders else None

    @property
    def memory(self) -> int | None:
        return memory_of(self._folders["memory"]) if "memory" in self._folders else None

    @property
    def out_of_memory(self) -> int:
        """How many processes of the group the kernel killed for want of memory."""
        if "memory" not in self._folders:
            return 0
        folder = self._folders["memory"]
        text = read(folder / "memory.events") or read(folder / "memory.oom_control")
        counts = dict(line.split() for line in text.splitlines())
        return int(counts.get("oom_kill", 0))

    def remove(self, timeout: float = 5.0) -> None:
        """End whatever still runs in the group, then remove it. Does nothing the second time."""
        for folder in self._folders.values():
            _remove(folder, kill=True, timeout=timeout)


def _remove(folder: Path, kill: bool, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if not kill:
                return
            if time.monotonic() > deadline:
                left = read(folder / "cgroup.procs").split()
                raise UsageError(
                    f"the control group {folder} is still busy after {timeout:g} s: processes {left}"
                ) from error
        for pid in read(folder / "cgroup.procs").split():
            if int(pid) not in (0, os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.005)


def remove_if_empty(folder: Path) -> None:
    """Remove a group of a dead launcher; one that still holds processes is left to them."""
    _remove(folder, kill=False, timeout=0)


def all_groups(prefix: str) -> Iterator[Path]:
    """Every group on this machine whose name begins with ``prefix``, in the hierarchies we make groups in."""
    seen = set()
    for controller in ("cpu", "memory"):
        hierarchy = find(controller)
        if hierarchy is None or hierarchy.mount in seen:
            continue
        seen.add(hierarchy.mount)
        for place, folders, _ in os.walk(hierarchy.mount):
            for name in list(folders):
                if name.startswith(prefix):
                    folders.remove(name)
                    yield Path(place) / name
