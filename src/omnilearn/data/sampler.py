"""Cuts an epoch into steps and each step into the workers' shares, and knows how far training has come.

Responsible for exactly once: each index is in one worker's share of one step of its epoch, under any plans.
Assumes that all ranks schedule the same plans for the same steps; then all compute the same shares, as these
depend on the position and the plan in force alone. Making plans and loading samples is left to others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index

import numpy as np
import numpy.typing as npt

from omnilearn.data.cut import LAST, Cut
from omnilearn.data.permutation import Permutation
from omnilearn.errors import InfeasibleError, UsageError

_VERSION = 1
NONE: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Share:
    """One step as one worker sees it: how the step is cut, and this worker's samples.

    ``step`` counts over epochs and is never reset; ``start`` is the offset in the epoch of the step's first
    sample; ``sizes`` says how many samples each worker has, ``indices`` which are this one's; ``active`` are those who
    take part. One that takes part in a small last step without a sample of its own computes what is ``lent`` to it,
    and adds nothing.
    """

    step: int
    epoch: int
    start: int
    sizes: tuple[int, ...]
    indices: npt.NDArray[np.int64]
    active: tuple[int, ...]
    lent: npt.NDArray[np.int64] = field(default_factory=lambda: NONE)

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def end(self) -> int:
        """The offset in the epoch after this step."""
        return self.start + self.total


class Sampler:
    """Shares of a dataset of ``size`` samples, cut by plans that may change at any step not yet handed out.

    Each step takes the next ``sum(batches)`` samples of the epoch's permutation; worker k has the k-th slice. The rest
    at the end is a smaller step, in proportion to the batches, in which each worker that has samples has its
    ``minimum`` or more, as far as there are enough; the others who take part have none. ``last="merge"`` adds the rest
    to the step before, ``last="drop"`` leaves it out. No step may have fewer samples than ``smallest``, the least
    that can be computed at all.

    >>> sampler = Sampler(10, [3, 1], shuffle=False)
    >>> [(share.sizes, share.indices.tolist()) for share in sampler.shares(rank=1)]
    [((3, 1), [3]), ((3, 1), [7]), ((1, 1), [9])]
    """

    def __init__(
        self,
        size: int,
        batches: Sequence[int],
        *,
        minimum: int | Sequence[int] = 1,
        shuffle: bool = True,
        seed: int = 0,
        last: str = "keep",
        smallest: int = 1,
    ) -> None:
        if last not in LAST:
            raise InfeasibleError(f"last must be one of {', '.join(map(repr, LAST))}, got {last!r}")
        if size < 1:
            raise InfeasibleError(f"the dataset has {size} samples: training needs at least one")
        if seed < 0:
            raise InfeasibleError(f"seed must not be negative, got {seed}")
        self.size, self.seed, self.shuffle, self._last, self.smallest = size, seed, shuffle, last, smallest
        # By the step they start at. Replaced and never changed, so that a prefetching thread may read it.
        self._plans = {0: self._cut(batches, minimum)}
        self._minimum = minimum
        self._epoch = self._offset = self._step = 0
        self._ahead = 0  # the first step that no iterator has handed out yet
        self._jumps = 0  # each ends the iterators begun before it
        self._check_rest(size)

    # The plan

    def schedule(self, batches: Sequence[int], at: int, *, minimum: int | Sequence[int] | None = None) -> None:
        """Cut by ``batches`` from step ``at`` on; what was scheduled for later steps is dropped.

        Another length means another number of workers; ``minimum`` then replaces the one given before.
        """
        if at < self._ahead:
            raise UsageError(
                f"a plan for step {at} comes too late: the steps before {self._ahead} are handed out, and "
                f"to cut them again would use samples twice: schedule it for step {self._ahead} or later"
            )
        minimum = self._minimum if minimum is None else minimum
        cut, current = self._cut(batches, minimum), self._start_of(self._step)
        self._plans = {start: plan for start, plan in self._plans.items() if current <= start < at} | {at: cut}
        self._minimum = minimum

    def batches_at(self, step: int) -> tuple[int, ...]:
        """The batches of the plan in force at ``step``, as known now."""
        return self._plans[self._start_of(step)].batches

    def _start_of(self, step: int) -> int:
        """The step at which the plan in force at ``step`` started."""
        start = max((start for start in self._plans if start <= step), default=None)
        if start is None:
            raise UsageError(f"the plan of step {step} is forgotten: training has come to step {self._step}")
        return start

    def _cut(self, batches: Sequence[int], minimum: int | Sequence[int]) -> Cut:
        cut = Cut(batches, minimum, self._last)
        if self._last == "drop" and self.size < cut.total:
            raise InfeasibleError(
                f"drop_last would drop all: the dataset has {self.size} samples, the global batch is "
                f"{cut.total}: use drop_last=False or a global batch of at most {self.size}"
            )
        return cut

    def _check_rest(self, samples: int) -> None:
        rest = self._in_force.rest(samples)
        if 0 < rest < self.smallest:
            raise InfeasibleError(too_small(rest, self.smallest, f"with {samples} samples, the last step of an epoch"))

    # The shares

    def shares(self, rank: int) -> Iterator[Share]:
        """The shares of ``rank`` from the position to the end of the epoch.

        May run ahead of what is consumed: a plan is looked up when its step is asked for. In a step whose
        plan has no place for ``rank`` (it left, or is yet to join) its share is empty.
        """
        workers = max(len(plan.batches) for plan in self._plans.values())
        if not 0 <= rank < workers:
            raise UsageError(f"rank {rank} is not in the plan, which has {workers} workers, counted from 0")
        return self._shares(rank, self._epoch, self._offset, self._step, self._jumps)

    def _shares(self, rank: int, epoch: int, offset: int, step: int, jumps: int) -> Iterator[Share]:
        order = Permutation(self.size, self.seed, epoch, self.shuffle)
        while (remaining := self.size - offset) > 0:
            plan = self._plans[self._start_of(step)]
            taken = plan.take(remaining)
            if not taken:
                return
            if jumps != self._jumps:
                raise UsageError(
                    f"the position went to epoch {self._epoch}, step {self._step} while the shares of epoch "
                    f"{epoch} were in use at step {step}: ask for shares() again"
                )
            sizes = plan.sizes(taken)
            first = offset + sum(sizes[:rank])
            indices = order(first, first + sum(sizes[rank : rank + 1]))
            lent = order(offset, offset + self.smallest) if rank in plan.active and not len(indices) else NONE
            share = Share(step, epoch, offset, sizes, indices, plan.active, lent)
            self._ahead = max(self._ahead, step + 1)
            yield share
            offset, step = share.end, step + 1

    # The position

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def offset(self) -> int:
        """Samples of this epoch behind the position."""
        return self._offset

    @property
    def step(self) -> int:
        """Steps behind the position, over all epochs."""
        return self._step

    @property
    def steps(self) -> int:
        """Steps of a whole epoch with the global batch in force."""
        return self._in_force.steps(self.size)

    @property
    def remaining_steps(self) -> int:
        """Steps from the position to the end of the epoch with the global batch in force."""
        return self._in_force.steps(self.size - self._offset)

    @property
    def _in_force(self) -> Cut:
        return self._plans[self._start_of(self._step)]

    def consumed(self, share: Share) -> None:
        """Move the position behind ``share``; one already behind it (another rank's) changes nothing."""
        if share.epoch != self._epoch:
            raise UsageError(f"step {share.step} is of epoch {share.epoch}, training is in epoch {self._epoch}")
        if share.step >= self._step:
            self._offset, self._step = share.end, share.step + 1

    def next_epoch(self) -> None:
        """Go to the start of the next epoch, also from the middle of this one. The step count goes on."""
        self._jump(self._epoch + 1, 0, self._step)

    def _jump(self, epoch: int, offset: int, step: int) -> None:
        self._epoch, self._offset, self._step = epoch, offset, step
        self._ahead = step
        self._jumps += 1

    def state_dict(self) -> dict[str, int]:
        fixed = {"version": _VERSION, "size": self.size, "seed": self.seed, "shuffle": self.shuffle}
        return fixed | {"epoch": self._epoch, "offset": self._offset, "step": self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a saved position, also one saved with another number of workers or another global batch.

        The plan in force stays; plans scheduled for later are dropped, as their steps meant another position.
        """
        mine = self.state_dict()
        if missing := sorted(mine.keys() - state.keys()):
            raise UsageError(f"this is no saved position of a sampler: it lacks {', '.join(missing)}")
        for key in ("version", "size", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise UsageError(
                    f"the position was saved with {key} {state[key]}, this sampler has {key} {mine[key]}: it "
                    f"would repeat some samples and miss others: restore with the same {key}, or start anew"
                )
        epoch, offset, step = (index(state[key]) for key in ("epoch", "offset", "step"))
        if not (0 <= offset <= self.size and epoch >= 0 and step >= 0):
            raise UsageError(f"no position in {self.size} samples: epoch {epoch}, offset {offset}, step {step}")
        self._check_rest(self.size - offset)
        self._plans = {step: self._in_force}
        self._jump(epoch, offset, step)


def too_small(rest: int, smallest: int, what: str) -> str:
    return (
        f"{what} has {rest} sample{'s' * (rest > 1)}, and this model cannot be trained on fewer than {smallest} "
        f"at a time (BatchNorm): leave the rest out with drop_last=True, or add it to the step before with last='merge'"
    )
