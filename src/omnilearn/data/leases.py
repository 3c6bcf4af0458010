"""Which samples of an epoch are free, lent out or done, where workers take them at their own pace.

Responsible for exactly once without steps: a worker is lent the next range of the epoch's order, and what it does not
finish is lent again. Pure book-keeping; who is alive and how many samples a worker gets is decided by others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omnilearn.errors import InfeasibleError, UsageError

Range = tuple[int, int]


@dataclass(frozen=True)
class Lease:
    """Positions ``start`` to ``stop - 1`` of the order of ``epoch``."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Leases:
    """One epoch of ``size`` samples. ``done`` are ranges that a run before has finished.

    >>> epoch = Leases(10)
    >>> first, second = epoch.take("a", 6), epoch.take("b", 6)
    >>> epoch.finish("a", first), epoch.give_back("b"), epoch.take("a", 2)
    (True, 4, Lease(epoch=0, start=6, stop=8))
    """

    def __init__(self, size: int, epoch: int = 0, *, minimum: int = 1, done: Sequence[Range] = ()) -> None:
        if size < 1:
            raise InfeasibleError(f"the dataset has {size} samples: training needs at least one")
        self.size, self.epoch, self._minimum = size, epoch, max(minimum, 1)
        self._done = _merged(done)
        if self._done and not 0 <= self._done[0][0] <= self._done[-1][1] <= size:
            raise UsageError(f"the finished ranges {self._done} are not within {size} samples")
        self._free = _gaps(self._done, size)
        self._lent: dict[Lease, object] = {}

    def take(self, worker: object, count: int) -> Lease | None:
        """Lend ``worker`` the next ``count`` samples, or as many as are left there; None: nothing is free now.

        No rest below the minimum is left: the lease is a little smaller for it or, where it would get too small
        itself, larger.
        """
        if count < 1:
            raise UsageError(f"a lease needs at least one sample, got {count}")
        if not self._free:
            return None
        start, stop = self._free[0]
        size = min(max(count, self._minimum), stop - start)
        rest = stop - start - size
        if 0 < rest < self._minimum:
            smaller = stop - start - self._minimum
            size = smaller if smaller >= self._minimum else stop - start
        lease = Lease(self.epoch, start, start + size)
        self._free[:1] = [(lease.stop, stop)] if lease.stop < stop else []
        self._lent[lease] = worker
        return lease

    def finish(self, worker: object, lease: Lease) -> bool:
        """The samples of ``lease`` are used. False: it is not ``worker``'s (any more)."""
        if self._lent.get(lease) != worker or lease not in self._lent:
            return False
        del self._lent[lease]
        self._done = _merged([*self._done, (lease.start, lease.stop)])
        return True

    def give_back(self, worker: object) -> int:
        """Everything ``worker`` holds is free again; how many samples that were."""
        back = [lease for lease, owner in self._lent.items() if owner == worker]
        for lease in back:
            del self._lent[lease]
        self._free = _merged([*self._free, *((lease.start, lease.stop) for lease in back)])
        return sum(lease.size for lease in back)

    @property
    def free(self) -> int:
        return sum(stop - start for start, stop in self._free)

    @property
    def lent(self) -> int:
        return sum(lease.size for lease in self._lent)

    @property
    def over(self) -> bool:
        """Every sample is used."""
        return not self._free and not self._lent

    @property
    def position(self) -> tuple[int, list[Range]]:
        """How many samples are used without a gap, and the ranges beyond that are used too."""
        if self._done and self._done[0][0] == 0:
            return self._done[0][1], list(self._done[1:])
        return 0, list(self._done)


def _merged(ranges: Sequence[Range]) -> list[Range]:
    """In order, neighbours joined."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        elif stop > start:
            merged.append((start, stop))
    return merged


def _gaps(ranges: Sequence[Range], size: int) -> list[Range]:
    edges = [0, *(edge for pair in ranges for edge in pair), size]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
