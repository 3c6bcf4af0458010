"""What to emulate: a specification becomes plain values, checked against the machine before anything starts.

Pure: no process, no file but the one named. How the values are enforced is the business of
``emulator.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from omnilearn.cluster import units
from omnilearn.errors import InfeasibleError, UsageError

Mode = Literal["sync", "async"]

# Cores per worker in the papers' experiments; HLx: the fastest has x times the cores of the slowest.
LEVELS: dict[str, dict[str, tuple[float, ...]]] = {
    "sync": {"HL1": (12, 12, 12, 12), "HL2": (12, 12, 8, 16), "HL4": (9, 9, 6, 24), "HL8": (6, 6, 4, 32)},
    "async": {"HL1": (10, 10, 10, 10), "HL2": (8, 8, 8, 16), "HL4": (10, 10, 4, 16), "HL8": (4, 4, 4, 28)},
}
USED = 0.9  # of the machine's cores; the rest is for the launcher and the system
SMALLEST = 0.01  # cores; below this a worker would take minutes to import torch
LARGEST = 1e6

FORMS = "HL1, HL2, HL4, HL8 (or HL8-async), ratios like 6,6,4,32, cpu=0.5,1.2, mps=12,12,8,64, or a TOML file"


@dataclass(frozen=True)
class Worker:
    """One worker's limits; None is no limit. In cores, bytes, bit/s, seconds, percent of a card."""

    cpu: float | None = None
    memory: int | None = None
    bandwidth: int | None = None
    latency: float | None = None
    mps: float | None = None
    device: str | None = None

    def merged(self, other: Worker) -> Worker:
        """These limits, with those that ``other`` names put in their place."""
        named = {f.name: getattr(other, f.name) for f in fields(other) if getattr(other, f.name) is not None}
        return replace(self, **named)

    def __str__(self) -> str:
        parts = [] if self.cpu is None else [f"{self.cpu:.4g} cores"]
        parts += [] if self.memory is None else [units.show_size(self.memory)]
        parts += [] if self.bandwidth is None else [units.show_rate(self.bandwidth)]
        parts += [] if self.latency is None else [units.show_duration(self.latency) + " latency"]
        parts += [] if self.mps is None else [f"{self.mps:g}% of a card"]
        parts += [] if self.device is None else [f"on {self.device}"]
        return " + ".join(parts) or "no limit"


@dataclass(frozen=True)
class Change:
    """New limits for some workers, at a step or at a second after the workers started."""

    values: tuple[tuple[int, Worker], ...]
    at_step: int | None = None
    at_second: float | None = None

    @property
    def when(self) -> str:
        return f"step {self.at_step}" if self.at_second is None else f"{self.at_second:g} s"


@dataclass(frozen=True)
class Emulation:
    """A cluster to play: its workers and how they change. ``spec`` is what the user wrote."""

    spec: str
    workers: tuple[Worker, ...]
    changes: tuple[Change, ...] = ()

    @property
    def nproc(self) -> int:
        return len(self.workers)

    def uses(self, *names: str) -> bool:
        """Whether any worker, at the start or later, has one of these limits."""
        everybody = [*self.workers, *(worker for change in self.changes for _, worker in change.values)]
        return any(getattr(worker, name) is not None for worker in everybody for name in names)

    def at_most(self, worker: int) -> Worker:
        """The worker with the largest share that it gets in the course of time."""
        later = [limits.cpu for change in self.changes for k, limits in change.values if k == worker]
        shares = [share for share in (self.workers[worker].cpu, *later) if share is not None]
        return replace(self.workers[worker], cpu=max(shares, default=None))

    def __str__(self) -> str:
        changes = f", {len(self.changes)} change{'s' * (len(self.changes) > 1)}" if self.changes else ""
        if all(worker == Worker(cpu=worker.cpu) and worker.cpu is not None for worker in self.workers):
            return f"{self.spec}: {', '.join(f'{worker.cpu:.4g}' for worker in self.workers)} cores{changes}"
        return f"{self.spec}: {', '.join(map(str, self.workers))}{changes}"


def parse(spec: str, nproc: int | None, cores: float, mode: Mode = "sync") -> Emulation:
    """Read ``spec`` for a machine of ``cores`` cores.

    Raises:
        InfeasibleError: a value that cannot be: unknown level, shares above the machine, a negative number.
        UsageError: what does not fit together: another number of workers than ``nproc``, a bad file.
    """
    spec = spec.strip()
    kind, equals, values = spec.partition("=")
    is_level = spec.upper().startswith("HL") and not spec.endswith(".toml")
    if spec.endswith(".toml") or (os.path.isfile(spec) and not is_level):
        from omnilearn.cluster.emulation_file import read

        emulation = read(Path(spec), nproc, cores, mode)
    elif is_level:
        emulation = Emulation(spec, tuple(Worker(cpu=share) for share in level(spec, cores, mode)))
    elif equals and kind.strip() == "cpu":
        emulation = Emulation(spec, tuple(Worker(cpu=share) for share in numbers(values, spec)))
    elif equals and kind.strip() == "mps":
        emulation = Emulation(spec, tuple(Worker(mps=share) for share in numbers(values, spec)))
    elif spec and spec[0] in "0123456789.-+":
        emulation = Emulation(spec, tuple(Worker(cpu=share) for share in scaled(numbers(spec, spec), cores)))
    else:
        raise InfeasibleError(f"emulation {spec!r} is not understood: use {FORMS}")
    if nproc is not None and nproc != emulation.nproc:
        raise UsageError(
            f"emulation {spec!r} is a cluster of {emulation.nproc} workers, but --nproc is {nproc}: "
            f"leave --nproc out, or give {nproc} ratios like {','.join('1' * nproc)}"
        )
    check(emulation, cores)
    return emulation


def level(name: str, cores: float, mode: str = "sync") -> tuple[float, ...]:
    """The cores of each worker at one of the papers' levels, scaled to this machine."""
    word, _, suffix = name.strip().upper().partition("-")
    table = LEVELS.get(suffix.lower() or mode, {})
    if word not in table:
        raise InfeasibleError(f"unknown level {name!r}: choose from {', '.join(LEVELS['sync'])}, or HL8-async")
    return scaled(table[word], cores)


def scaled(ratios: Sequence[float], cores: float) -> tuple[float, ...]:
    """Shares in the given ratio that take ``USED`` of the machine."""
    return tuple(round(USED * cores * ratio / math.fsum(ratios), 6) for ratio in ratios)


def numbers(text: str, spec: str) -> tuple[float, ...]:
    """Positive numbers separated by commas."""
    values = []
    for word in text.split(","):
        try:
            values.append(float(word))
        except ValueError:
            raise InfeasibleError(f"{word.strip()!r} in emulation {spec!r} is not a number") from None
        if not 0 < values[-1] <= LARGEST:
            raise InfeasibleError(f"{word.strip()!r} in emulation {spec!r} must be above zero, and at most {LARGEST:g}")
    return tuple(values)


def check(emulation: Emulation, cores: float) -> None:
    """Raise if the machine is too small for the cluster, at the start or after any change."""
    workers = list(emulation.workers)
    _check(emulation.spec, workers, cores, "")
    if len({change.at_second is None for change in emulation.changes}) > 1:
        most = [emulation.at_most(k) for k in range(emulation.nproc)]
        _check(emulation.spec, most, cores, " if changes by step and by second come together, as they may")
    for change in emulation.changes:
        for index, worker in change.values:
            workers[index] = workers[index].merged(worker)
        _check(emulation.spec, workers, cores, f" after the change at {change.when}")


def _check(spec: str, workers: Sequence[Worker], cores: float, when: str) -> None:
    shares = [worker.cpu for worker in workers if worker.cpu is not None]
    if math.fsum(shares) > cores + 1e-6:
        raise InfeasibleError(
            f"emulation {spec!r} asks for {math.fsum(shares):.4g} cores{when}, and this machine has {cores:.4g}: "
            f"ask for less, or give ratios (--emulate {','.join(f'{share:g}' for share in shares)}) to have them scaled"
        )
    for index, worker in enumerate(workers):
        if worker.cpu is not None and worker.cpu < SMALLEST:
            raise InfeasibleError(
                f"worker {index} of emulation {spec!r} gets {worker.cpu:.4g} cores{when}, "
                f"less than {SMALLEST}: use fewer workers or a milder ratio"
            )
    percents = [worker.mps for worker in workers if worker.mps is not None]
    if math.fsum(percents) > 100 + 1e-6:
        raise InfeasibleError(f"emulation {spec!r} asks for {math.fsum(percents):g}% of a card: ask for at most 100")
