"""How one plan cuts a step: as planned while enough samples are left, by the rules for the tail at the end.

Responsible for sizes only, as a pure function of the plan and of how many samples the epoch has left, so that
every rank computes the same. Assumes, looking one step ahead, that the plan stays; where it does not, the
next step's rules still hold. Which samples these are is the sampler's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np

from omnilearn.control.split import apportion
from omnilearn.errors import InfeasibleError


class Cut:
    """A plan's ``batches`` (0: parked) with the least each worker must have in a step it takes part in.

    >>> cut = Cut([6, 2], minimum=2)
    >>> cut.sizes(cut.take(20)), cut.sizes(cut.take(9)), cut.sizes(cut.take(4))
    ((6, 2), (3, 2), (2, 2))
    """

    def __init__(self, batches: Sequence[int], minimum: int | Sequence[int]) -> None:
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
        self.active = [k for k in range(workers) if self.batches[k]]
        if not self.active:
            raise InfeasibleError(f"no active worker among {workers}: at least one batch must be positive")
        self.total = sum(self.batches)
        self.smallest = min(self.minimums[k] for k in self.active)
        self._needs = sum(self.minimums[k] for k in self.active)
        # What a last step should hold, for all and for any one: parked ones count: they may be back by then.
        self._reserve = min(self.total, sum(self.minimums))
        self._reserve_for_one = min(self.total, max(self.minimums))

    def take(self, remaining: int) -> int:
        """How many of the ``remaining`` samples of the epoch the next step takes: at most a full step."""
        rest = remaining - self.total
        if rest <= 0 or rest >= self._reserve:
            return min(remaining, self.total)
        # The step after would be the last and too small: lend it what this step's minimums leave free.
        last = min(self._reserve, remaining - self._needs)
        if last < self._reserve_for_one <= remaining - self.smallest:
            last = self._reserve_for_one  # too little to lend for even one worker: fewer take part in both
        return remaining - last

    def sizes(self, total: int) -> tuple[int, ...]:
        """Each worker's part of a step of ``total`` samples, in proportion to the batches."""
        if total == self.total:
            return self.batches
        chosen = self.active if total >= self._needs else self._fitting(total)
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
