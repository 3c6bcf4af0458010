"""How much memory is in use, at its peak, and free: of a CUDA device, or of a process on Linux.

A gauge only reads, and on a CPU draws a limit of its own below the one at which the kernel kills. What follows from
the numbers is ``memory``'s business.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path

import torch

from omnilearn.cluster import cgroup

LIBC = ctypes.CDLL(None)
M_MMAP_THRESHOLD = -3  # malloc.h
"""The smallest block that malloc gives back to the kernel when it is freed (mallopt)."""
MARGIN = 0.05
"""A process's own limit is so much of what is free below the kernel's."""


class Gauge:
    """A device that does not tell, and what all gauges have. ``kills``: beyond the limit comes no error but the end."""

    kills = False

    def domain(self) -> str:
        return ""

    def used(self) -> int:
        return 0

    def free(self) -> int:
        return 0

    def reset(self) -> None:
        pass

    def peak(self) -> int:
        return 0

    def release(self) -> None:
        pass

    def economise(self) -> None:
        pass

    def fence(self, room: int) -> None:
        pass

    def lift(self) -> None:
        pass


class Card(Gauge):
    """A CUDA device, by its allocator's books: the host knows them, no stream is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def domain(self) -> str:
        card = str(getattr(torch.cuda.get_device_properties(self._device), "uuid", self._device))
        return card if self._fraction() == 1 else f"the fraction of {card} of process {os.getpid()}"

    def _fraction(self) -> float:
        return float(getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(self._device))

    def used(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def free(self) -> int:
        """Of the card, of this process's fraction, and what the allocator keeps in store."""
        free, total = torch.cuda.mem_get_info(self._device)
        held, used = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
        return max(min(free, int(total * self._fraction()) - held), 0) + held - used

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def release(self) -> None:
        torch.cuda.empty_cache()


class Process(Gauge):
    """A CPU worker on Linux, by its resident set and the tightest limit that holds for it.

    Above a control group's limit the kernel kills. So where a new size is tried, and near the limit, the process gets a
    limit of its own (RLIMIT_DATA) for that pass, a little below: the allocator then raises an error instead.
    """

    kills = True

    def __init__(self) -> None:
        self._before: tuple[int, int] | None = None
        self._ours = self._highest = 0
        hierarchy = cgroup.find("memory")
        groups = hierarchy.path() if hierarchy else []
        self._groups = [group for group in groups if cgroup.memory_of(group) is not None]

    def domain(self) -> str:
        return min(self._limits(), default=(0, ""))[1]

    def _limits(self) -> list[tuple[int, str]]:
        """(bytes left, name) of all limits that hold for this process."""
        available = _field("/proc/meminfo", "MemAvailable")
        limits = [(available, "the machine's memory")] if available else []
        for group in self._groups:
            limit = cgroup.memory_of(group)
            if limit is not None:
                limits.append((max(limit - cgroup.memory_used(group), 0), f"the control group {group}"))
        for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            soft, _ = resource.getrlimit(kind)
            if soft != resource.RLIM_INFINITY:
                limits.append(
                    (max(soft - _field("/proc/self/status", used) + kept(), 0), f"process {os.getpid()} ({used})")
                )
        return limits

    def used(self) -> int:
        return _field("/proc/self/status", "VmRSS")

    def free(self) -> int:
        return min(self._limits(), default=(0, ""))[0]

    def reset(self) -> None:
        self.release()  # what malloc keeps in store would hide what a pass takes
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self._highest = _field("/proc/self/status", "VmHWM")

    def peak(self) -> int:
        peak = _field("/proc/self/status", "VmHWM")
        return peak if peak > self._highest else 0  # a peak from before says nothing

    def release(self) -> None:
        if hasattr(LIBC, "malloc_trim"):
            LIBC.malloc_trim(0)

    def economise(self) -> None:
        """What is freed goes back to the kernel at once: kept in store, it is soon in pieces too small to be used."""
        if hasattr(LIBC, "mallopt"):
            LIBC.mallopt(M_MMAP_THRESHOLD, 2**20)
        self.release()

    def fence(self, room: int) -> None:
        self.lift()
        used = _field("/proc/self/status", "VmData")
        if not used or not room:
            return
        stacks = torch.get_num_threads() * 2**23  # threads may start now: their stacks count, hardly a page is used
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = used - kept() + stacks + int(room * (1 - MARGIN))
        if soft == resource.RLIM_INFINITY or wanted < soft:
            self._before, self._ours = (soft, hard), wanted
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))

    def lift(self) -> None:
        before, self._before = self._before, None
        if before is not None and resource.getrlimit(resource.RLIMIT_DATA)[0] == self._ours:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def gauge_of(device: torch.device) -> Gauge:
    if device.type == "cuda":
        return Card(device)
    return Process() if device.type == "cpu" and Path("/proc/self/status").exists() else Gauge()


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``; the ninth number is what malloc holds free."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def kept() -> int:
    """Bytes that malloc keeps of what was freed: they can be had again without asking the kernel."""
    if not hasattr(LIBC, "mallinfo2"):
        return 0
    LIBC.mallinfo2.restype = _Mallinfo
    return int(LIBC.mallinfo2().numbers[8])


def _field(path: str, name: str) -> int:
    """Bytes, from one of the kernel's tables (0: it has no such line)."""
    for line in cgroup.read(Path(path)).splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0
