"""How one plan cuts a step: as planned while enough samples are left, by the rules for the last step of an epoch.

Responsible for sizes only, as a pure function of the plan and of how many samples the epoch has left, so that every
rank computes the same. Where steps end follows from the data and the global batch alone, never from who takes part.
Which samples these are is the sampler's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np

from omnilearn.control.split import apportion
from omnilearn.errors import InfeasibleError

LAST = ("keep", "merge", "drop")
"""What becomes of the samples that are left when no whole global batch is: a last, smaller step; a part of the step
before; nothing."""


class Cut:
    """A plan's ``batches`` (0: parked) with the least each worker must have in a step it has samples of.

    >>> cut = Cut([6, 2], minimum=2)
    >>> cut.sizes(cut.take(20)), cut.sizes(cut.take(5)), cut.sizes(cut.take(3))
    ((6, 2), (3, 2), (3, 0))
    >>> Cut([6, 2], minimum=2, last="merge").take(12)
    12
    """

    def __init__(self, batches: Sequence[int], minimum: int | Sequence[int], last: str = "keep") -> None:
        self.batches = tuple(index(b) for b in batches)
        workers = len(self.batches)
        lows = minimum if isinstance(minimum, Sequence | np.ndarray) else [minimum] * workers
        self.minimums = tuple(index(low) for low in lows)
        if len(self.minimums) != workers:
            raise InfeasibleError(
                f"minimum has {len(self.minimums)} values for {workers} workers: give one, or one per worker"
            )
        for k, (batch, low) in enumerate(zip(self.batches, self.minimums, strict=True)):
            if batch < 0 or low < 1:
                raise InfeasibleError(f"worker {k}: batch {batch} must be at least 0, minimum {low} at least 1")
            if 0 < batch < low:
                raise InfeasibleError(f"worker {k}: batch {batch} is below its minimum {low}: raise it or park it")
        self.active = tuple(k for k in range(workers) if self.batches[k])
        if not self.active:
            raise InfeasibleError(f"no active worker among {workers}: at least one batch must be positive")
        self.total, self._last = sum(self.batches), last
        self._needs = sum(self.minimums[k] for k in self.active)

    def take(self, remaining: int) -> int:
        """How many of the ``remaining`` samples of the epoch the next step takes (0: what is left is left out)."""
        if remaining < self.total:
            return 0 if self._last == "drop" else remaining
        return remaining if self._last == "merge" and remaining < 2 * self.total else self.total

    def steps(self, samples: int) -> int:
        """In how many steps so many samples are used."""
        if self._last == "keep" or (self._last == "merge" and 0 < samples < self.total):
            return -(-samples // self.total)
        return samples // self.total

    def rest(self, samples: int) -> int:
        """How many samples a last, smaller step has (0: there is none)."""
        smaller = self._last == "keep" or (self._last == "merge" and samples < self.total)
        return samples % self.total if smaller else 0

    def sizes(self, total: int) -> tuple[int, ...]:
        """Each worker's part of a step of ``total`` samples, in proportion to the batches. Where these are too few for
        everybody's minimum, some of those who take part have none."""
        if total == self.total:
            return self.batches
        chosen = list(self.active) if total >= self._needs else self._fitting(total)
        batches = np.array([self.batches[k] for k in chosen])
        low = np.minimum([self.minimums[k] for k in chosen], total)
        high = batches if batches.sum() >= total else np.full(len(chosen), total)
        sizes = np.zeros(len(self.batches), dtype=np.int64)
        sizes[chosen] = apportion(batches.astype(float), total, low, high)
        return tuple(sizes.tolist())

    def _fitting(self, total: int) -> list[int]:
        """Workers whose minimums fit in ``total``, largest batch first; if none does, the nearest one."""
        chosen: list[int] = []
        for k in sorted(self.active, key=lambda k: -self.batches[k]):
            if self.minimums[k] <= total:
                chosen.append(k)
                total -= self.minimums[k]
        return chosen or [min(self.active, key=lambda k: self.minimums[k])]
