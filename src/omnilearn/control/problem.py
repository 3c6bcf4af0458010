"""What a split has to respect: the global batch, each worker's bounds, the multiple; and what a split is, a plan.

Checked once, when it is made: everything below may assume that a solution exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from omnilearn.errors import InfeasibleError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

UNBOUNDED = 2**40
"""A maximum no batch reaches."""


@dataclass(frozen=True)
class Problem:
    """The constraints of a split of ``global_batch`` over workers.

    ``minimum`` and ``maximum`` hold for active workers; a parked worker has batch 0. ``speeds`` are relative
    throughputs known before anything was measured (core counts, FLOP/s). ``micro``: a batch above it is computed in
    several passes, each of which has the fixed cost of one (None: nobody's is).

    >>> Problem.of(64, speeds=[6, 6, 4, 32]).workers
    4
    """

    global_batch: int
    speeds: Floats
    minimum: Ints
    maximum: Ints
    multiple_of: int = 1
    park: bool = True
    micro: Ints | None = None

    @staticmethod
    def of(
        global_batch: int,
        *,
        workers: int | None = None,
        speeds: Sequence[float] | None = None,
        minimum: int | Sequence[int] = 1,
        maximum: int | Sequence[int] | None = None,
        multiple_of: int = 1,
        park: bool = True,
        micro: int | Sequence[int] | None = None,
    ) -> Problem:
        """Build a problem from plain values; numbers stand for all workers alike."""
        count = workers if workers is not None else len(speeds) if speeds is not None else 0
        if count < 1:
            raise InfeasibleError(f"a plan needs at least one worker, got {count}")

        def per_worker(name: str, value: int | Sequence[int]) -> Ints:
            array = (
                np.broadcast_to(np.asarray(value, dtype=np.int64), (count,))
                if np.ndim(value) == 0
                else np.asarray(value, dtype=np.int64)
            )
            if array.shape != (count,):
                raise InfeasibleError(
                    f"{name} has {array.size} values for {count} workers: give one number or one per worker"
                )
            return np.array(array)

        return Problem(
            global_batch=int(global_batch),
            speeds=np.ones(count) if speeds is None else np.asarray(speeds, dtype=np.float64),
            minimum=per_worker("minimum", minimum),
            maximum=per_worker("maximum", UNBOUNDED if maximum is None else maximum),
            multiple_of=int(multiple_of),
            park=park,
            micro=None if micro is None else per_worker("micro", micro),
        )

    def __post_init__(self) -> None:
        n, B, m = self.workers, self.global_batch, self.multiple_of
        if B < 1:
            raise InfeasibleError(f"global_batch must be at least 1, got {B}")
        if m < 1:
            raise InfeasibleError(f"multiple_of must be at least 1, got {m}")
        if B % m:
            raise InfeasibleError(
                f"global_batch {B} is not a multiple of multiple_of {m}: use {max(m, B // m * m)} or {(B // m + 1) * m}"
            )
        if self.speeds.shape != (n,) or not np.all(np.isfinite(self.speeds) & (self.speeds > 0)):
            raise InfeasibleError(f"speeds must be one positive number per worker, got {_brief(self.speeds)}")
        if np.any(self.minimum < 1):
            raise InfeasibleError(f"minimum batches must be at least 1, got {_brief(self.minimum)}")
        if self.micro is not None and (self.micro.shape != (n,) or np.any(self.micro < 1)):
            raise InfeasibleError(f"micro-batches must be one of at least 1 per worker, got {_brief(self.micro)}")
        low, high = self.units
        if np.any(low > self.maximum // m):
            k = int(np.argmax(low > self.maximum // m))
            raise InfeasibleError(
                f"worker {k}: no multiple of {m} lies between its minimum {self.minimum[k]} and its maximum "
                f"{self.maximum[k]}: raise max_batch, or lower min_batch or multiple_of"
            )
        if int(high.sum()) * m < B:
            raise InfeasibleError(
                f"the workers' maximums hold {int(high.sum()) * m} samples, global_batch is {B}: raise max_batch, "
                f"lower global_batch, or add workers (maximums: {_brief(self.maximum)})"
            )
        if not self.park and int(low.sum()) * m > B:
            raise InfeasibleError(
                f"global_batch {B} is below the sum of the workers' minimums {int(low.sum()) * m}: raise global_batch, "
                f"lower min_batch, or let workers be parked (minimums: {_brief(self.minimum)})"
            )
        if self.park and int(low.min()) * m > B:
            raise InfeasibleError(
                f"global_batch {B} is below every worker's minimum (smallest: {int(low.min()) * m}): raise "
                f"global_batch or lower min_batch"
            )

    @property
    def workers(self) -> int:
        return len(self.minimum)

    @cached_property
    def units(self) -> tuple[Ints, Ints]:
        """Minimum and maximum per worker, counted in multiples; a maximum is the global batch at most.

        A minimum above the global batch stays above it: such a worker can only be parked.
        """
        m = self.multiple_of
        low = -(-self.minimum // m)
        return low, np.maximum(np.minimum(self.maximum, self.global_batch) // m, low)

    def holding(self, micro: npt.ArrayLike) -> Problem:
        """The same problem, each worker computing at most so many samples at a time (0, or the batch: no matter)."""
        held = np.asarray(micro, dtype=np.int64)
        held = np.where((held > 0) & (held < self.global_batch), held, UNBOUNDED)
        return replace(self, micro=None if np.all(held == UNBOUNDED) else held)

    def check(self, batches: Ints) -> None:
        """Raise if ``batches`` is not a valid split of this problem."""
        b = np.asarray(batches)
        active = b > 0
        if (
            b.shape != (self.workers,)
            or int(b.sum()) != self.global_batch
            or np.any(b % self.multiple_of)
            or np.any(b[active] < self.minimum[active])
            or np.any(b > self.maximum)
            or not (self.park or np.all(active))
        ):
            raise InfeasibleError(f"{_brief(b)} is not a split of {self}")


@dataclass(frozen=True)
class Plan:
    """A split in force: each worker's batch (0: parked), why it was made and what it promises.

    ``predicted`` and ``instead_of`` are seconds per step with this plan and with the one before it.
    """

    batches: tuple[int, ...]
    reason: str = "start"
    predicted: float | None = field(default=None, compare=False)
    instead_of: float | None = field(default=None, compare=False)

    @cached_property
    def sizes(self) -> Ints:
        """The batches, to compute with."""
        sizes = np.array(self.batches, dtype=np.int64)
        sizes.flags.writeable = False
        return sizes

    @cached_property
    def active(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self.sizes).tolist())

    @cached_property
    def parked(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self.sizes == 0).tolist())

    @property
    def gain(self) -> float:
        """Predicted saving against the plan before, as a fraction of its step time."""
        return 1 - self.predicted / self.instead_of if self.predicted and self.instead_of else 0.0


def _brief(values: npt.ArrayLike) -> str:
    shown = np.asarray(values).tolist()
    return str(shown) if len(shown) <= 8 else f"{shown[:8]}… ({len(shown)} values)"
