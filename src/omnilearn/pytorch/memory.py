"""How many samples fit at once? Learned from what passes really took, before memory runs out.

A pass over b samples needs a fixed part and a part per sample. Both are read in the first passes, and in the first of a
size that comes near the limit: the allocator's peak on CUDA, the peak resident set on a CPU. There a look costs up to
half a step, because what malloc keeps in store is given back before; all other passes cost nothing. Assumes that memory
grows with the number of samples. Catching the error where it comes all the same is left to ``attempt``.
"""

from __future__ import annotations

import gc
import socket

import torch

from omnilearn.errors import OmniLearnError
from omnilearn.pytorch import micro
from omnilearn.pytorch.gauge import gauge_of

HEADROOM = 0.15
"""Of what is free beside the fixed part, this is left alone: fragmentation, libraries, other processes."""
NEAR = 0.4
"""A pass that takes more than this part of what is free is near the limit."""
LOOKS = 3
"""So many passes are looked at, at least: in the first step, gradients and optimizer state are still new…"""
PLENTY = 4
"""… unless so many times as much as they need is free: then nobody looks, nor at larger sizes while that is so."""


class OutOfMemoryError(OmniLearnError, MemoryError):
    """Not even the smallest micro-batch fits into a worker's memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA's error, Python's, and that of torch's CPU allocator, which has no type of its own."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)


class Memory:
    """This worker's memory: which micro-batches it should compute, and what became of them.

    ``most`` is the user's own bound, ``minimum`` the least that the model can train on. ``fixed``: the share cannot be
    cut, because all workers have to make the same passes (SyncBatchNorm).
    """

    def __init__(self, device: torch.device, *, most: int | None = None, minimum: int = 1, fixed: bool = False) -> None:
        self.most, self.minimum, self.fixed = most, minimum, fixed
        self.proven = 0  # up to so many samples need no care
        self.failed = 0  # the size that ran out of memory last; whoever tells the others sets it back
        self.sharers = 1  # workers that share this memory
        self._gauge = gauge_of(device)
        self._near = False  # to the limit: from now on, passes on a CPU are fenced in
        self._cap: int | None = None  # learned the hard way
        self._estimate: int | None = None  # learned in time
        self._taken: dict[int, int] = {}  # bytes that passes of a size added
        self._watched = self._last = self._looks = self._start = self._limit = 0

    @property
    def domain(self) -> tuple[str, str]:
        """What this memory is, by name: workers with the same one share it."""
        return socket.gethostname(), self._gauge.domain()

    @property
    def micro_batch(self) -> int | None:
        """The largest micro-batch to compute (None: no limit is known)."""
        estimate = self._estimate
        if estimate is not None and not self._gauge.kills and not self.tight:
            estimate = max(estimate, self.proven)  # what ran once runs again
        bounds = [self.most] if self.fixed else [self.most, self._cap, estimate]
        return min((max(bound, self.minimum) for bound in bounds if bound is not None), default=None)

    def cut(self, samples: int) -> list[int]:
        """The micro-batches that a share is to be computed in."""
        return micro.sizes(samples, self.micro_batch or samples, self.minimum)

    def is_new(self, samples: int) -> bool:
        return samples > self.proven and not self.fixed and not self._plenty(samples)

    def _plenty(self, samples: int) -> bool:
        """Several times what these should need is free now."""
        if self._near or not self._last:
            return False
        return PLENTY * samples * self._taken[self._last] <= self._last * (self._gauge.free() // self.sharers)

    @property
    def tight(self) -> bool:
        """Memory ran out before."""
        return self._cap is not None

    # A pass

    def begin(self, samples: int) -> None:
        """A pass over so many samples comes. Where it is a new size, a CPU's allocator is told the room there is."""
        if self._watched:
            self.abandon()
        known = samples < self.proven or (samples == self.proven and self._looks >= LOOKS)
        if not known and self._plenty(samples):
            self.proven, self._looks, known = samples, LOOKS, True
        if known:
            if self._near and self._gauge.kills:
                self._gauge.fence(self._gauge.free() // self.sharers)
            return
        self._gauge.reset()
        self._watched, self._start = samples, self._gauge.used()
        room = self._gauge.free() // self.sharers
        self._limit = self._start + room if self._start and room else 0
        if samples > self.proven or self._near:
            self._gauge.fence(room)

    def end(self) -> None:
        """The pass that was begun went well."""
        samples, self._watched = self._watched, 0
        self._gauge.lift()
        if not samples:
            return
        self._looks += 1
        self.proven = max(self.proven, samples)
        taken = self._gauge.peak() - self._start
        if taken > 0 and self._limit:
            self._taken[samples], self._last = taken, samples
            self._estimate = self._fitting(samples)
            if taken > NEAR * (self._limit - self._start):
                self._come_near()

    def abandon(self) -> None:
        """The pass that was begun did not end well, or is no more."""
        self._watched = 0
        self._gauge.lift()

    def trust(self, samples: int) -> None:
        """Nearly so many ran well: with what was learned from them, these do too."""
        if self.micro_batch is None or self.micro_batch >= samples:
            self.proven = max(self.proven, samples)

    def refuse(self, samples: int) -> int:
        """So many did not fit. Returns the size to go on with: half of it, or more where more is known to run."""
        self.failed = samples
        self._come_near()
        smaller = max(samples // 2, self.proven if self.proven < samples else 0, self.minimum)
        self._cap = smaller if self._cap is None else min(smaller, self._cap)
        self.proven, self._looks = min(self.proven, self._cap), 0
        return self._cap

    def _come_near(self) -> None:
        if not self._near:
            self._near = True
            self._gauge.economise()

    def release(self) -> None:
        """Give back what is held without need."""
        gc.collect()
        self._gauge.release()

    def _fitting(self, samples: int) -> int:
        """How many fit, by the largest size that ran and the slope from smaller ones (else in proportion)."""
        taken, room = self._taken[samples], (self._limit - self._start) * (1 - HEADROOM)
        slopes = [
            (taken - less) / (samples - size) for size, less in self._taken.items() if 0 < size <= samples * 2 / 3
        ]
        slope = min(max([*slopes, 1.0]), taken / samples) if slopes else taken / samples
        return max(int(samples + (room - taken) / slope), 0)

    def __str__(self) -> str:
        if not self._last:
            return "no pass was measured yet"
        taken, free = _bytes(self._taken[self._last]), _bytes(self._limit - self._start)
        return f"{taken} for {self._last} samples, where {free} were free beside the {_bytes(self._start)} in use"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
