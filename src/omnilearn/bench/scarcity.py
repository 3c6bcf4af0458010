"""A worker with little memory, for real: beyond the limit its allocator raises its own error.

On a CPU as ``ulimit -d`` does, on a CUDA device by the process's fraction of its memory. Needs Linux.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from omnilearn.pytorch.gauge import LIBC, M_MMAP_THRESHOLD, kept


def occupied() -> int:
    """Bytes of this process that count against RLIMIT_DATA, less what malloc keeps of what was freed."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")) - kept()


class Scarcity:
    """From ``begin`` to ``lift`` this process has room for so many bytes more than it uses at the beginning.

    To be made early, before malloc has much in store that nobody counts.
    """

    def __init__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        LIBC.mallopt(M_MMAP_THRESHOLD, 2**18)  # what is freed goes back to the kernel, and is really not there

    def begin(self, room: int, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + room) / total, device)
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (occupied() + room, self._before[1]))

    def lift(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(1.0)
        resource.setrlimit(resource.RLIMIT_DATA, self._before)

    def end(self) -> None:
        self.lift()
        LIBC.mallopt(M_MMAP_THRESHOLD, 2**25)
