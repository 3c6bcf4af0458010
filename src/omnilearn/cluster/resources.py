"""What this worker can use: cores, memory, device, and how fast it is.

Sees through affinity masks and control-group limits: a limited worker is described as what it may use,
not as what the machine has. Decides nothing about batches.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omnilearn.cluster import cgroup
from omnilearn.errors import InfeasibleError

BLOCK = 0.025  # seconds; two and a half quota periods, so that a short burst at full speed does not fool us
BLOCKS = 3


@dataclass(frozen=True)
class Resources:
    """One worker's means.

    ``device_id`` is the card's uuid ("" for a CPU): two workers with the same one share a card. ``memory`` is
    what is usable: the card's, or the RAM, or the control group's limit if that is smaller. ``flops`` is
    measured, in FLOP/s, or None.
    """

    host: str
    cores: float
    device: str
    device_name: str
    device_id: str
    memory: int
    flops: float | None = None


def detect(device: str = "cpu", measure: bool = False) -> Resources:
    """What is here. ``cores`` is the smaller of affinity and quota; ``measure`` fills ``flops`` (0.1 s)."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        name, uuid, memory = _cpu_name(), "", ram()
    else:
        name, uuid, memory = _card(device)
    found = Resources(socket.gethostname(), cores(), kind, name, uuid, memory)
    return replace(found, flops=measure_flops(device)) if measure else found


def cores() -> float:
    """How many cores this process may use: affinity, or the quota of its control group or one above."""
    if hasattr(os, "sched_getaffinity"):
        count = float(len(os.sched_getaffinity(0)))
    else:
        count = float(os.cpu_count() or 1)
    quota = cgroup.cpu_limit()
    return count if quota is None else min(count, quota)


def speeds(resources: Sequence[Resources]) -> tuple[float, ...]:
    """The papers' rule for a first guess: core counts if all workers are CPUs, else FLOP/s."""
    if all(worker.device == "cpu" for worker in resources):
        return tuple(worker.cores for worker in resources)
    flops = [worker.flops for worker in resources]
    if None in flops:
        raise InfeasibleError(
            f"worker {flops.index(None)} of a cluster with accelerators has no measured FLOP/s: "
            "call detect(device, measure=True) on every worker"
        )
    return tuple(value for value in flops if value is not None)


def measure_flops(device: str = "cpu") -> float:
    """FLOP/s of float32 matrix products on ``device`` by torch: about 0.1 s after warm-up."""
    import torch

    place = torch.device(device)
    wait = _synchronise(torch, place)

    def product(size: int) -> Callable[[], None]:
        a, b = torch.rand(size, size, device=place), torch.rand(size, size, device=place)

        def once() -> None:
            torch.mm(a, b)
            wait()

        return once

    return flops_of(product)


def flops_of(product: Callable[[int], Callable[[], object]]) -> float:
    """FLOP/s of the matrix products that ``product(size)`` gives a function for: median of a few blocks."""
    size = 128
    while True:
        multiply = product(size)
        times = []
        for _ in range(3):  # the first pays for set-up, and a worker under a quota may be held in any of them
            start = time.perf_counter()
            multiply()
            times.append(time.perf_counter() - start)
        if min(times) > 0.001 or size >= 8192:
            break
        size *= 2
    rates = []
    for _ in range(BLOCKS):
        products, start, spent = 0, time.perf_counter(), 0.0
        while spent < BLOCK:
            multiply()
            products += 1
            spent = time.perf_counter() - start
        rates.append(2.0 * size**3 * products / spent)
    return statistics.median(rates)


def _synchronise(torch: Any, place: Any) -> Callable[[], None]:
    if place.type == "cpu":
        return lambda: None
    module = torch.get_device_module(place)
    return lambda: module.synchronize()


def peak_memory() -> int:
    """The most memory this process had in use so far, in bytes."""
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def has_card() -> bool:
    """Whether a CUDA card is here; without PyTorch nobody knows, and True."""
    try:
        import torch
    except ImportError:
        return True
    return bool(torch.cuda.is_available())


def ram() -> int:
    """The machine's memory, or what this process may use of it, in bytes."""
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup.memory_limit()
    return ram if limit is None else min(ram, limit)


def _cpu_name() -> str:
    for line in cgroup.read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _card(device: str) -> tuple[str, str, int]:
    """(name, uuid, bytes) of an accelerator."""
    import torch

    place = torch.device(device)
    module = torch.get_device_module(place)
    if not module.is_available():
        raise InfeasibleError(f"device {device!r} was asked for, but torch sees none here: use device='cpu'")
    if place.type == "mps":
        return "Apple GPU", socket.gethostname(), int(module.recommended_max_memory())
    index = module.current_device() if place.index is None else place.index
    if index >= module.device_count():
        raise InfeasibleError(f"device {device!r} was asked for, but there are only {module.device_count()} here")
    card = module.get_device_properties(index)
    uuid = str(getattr(card, "uuid", "")) or f"{socket.gethostname()}/{place.type}:{index}"
    return card.name, uuid, int(card.total_memory)
