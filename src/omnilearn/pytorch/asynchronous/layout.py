"""Many tensors in one flat piece of memory, so that a message is one stretch of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

ALIGNMENT = 64


class Bucket(NamedTuple):
    """Some tensors that lie side by side, and their bytes."""

    begin: int
    end: int
    members: list[int]


class Layout:
    """Where each of some tensors lies in a flat buffer of ``size`` bytes. Tensors of one type lie side by side."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._places: dict[int, tuple[torch.dtype, torch.Size, int, int]] = {}
        self._stretches: list[tuple[torch.dtype, int, int]] = []
        at = 0
        for kind in sorted({t.dtype for t in tensors}, key=str):
            begin = at
            for i, tensor in enumerate(tensors):
                if tensor.dtype == kind:
                    length = tensor.numel() * tensor.element_size()
                    self._places[i] = kind, tensor.shape, at, at + length
                    at = math.ceil((at + length) / ALIGNMENT) * ALIGNMENT
            self._stretches.append((kind, begin, at))
        self.count, self.size = len(tensors), at

    def empty(self, device: torch.device | str = "cpu", pin: bool = False) -> torch.Tensor:
        """A flat buffer of zeros (what lies between tensors stays zero)."""
        return torch.zeros(self.size, dtype=torch.uint8, device=device, pin_memory=pin)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors, in the order they were given, as windows on ``flat``."""
        places = [self._places[i] for i in range(self.count)]
        return [flat[begin:end].view(kind).view(shape) for kind, shape, begin, end in places]

    def stretches(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """All tensors of one type as one, per type."""
        return [flat[begin:end].view(kind) for kind, begin, end in self._stretches]

    def buckets(self, size: int) -> list[Bucket]:
        """All of it, cut between tensors into pieces of at least ``size`` bytes; the last may be smaller."""
        cuts: list[Bucket] = []
        for i, (_, _, begin, end) in self._places.items():
            if not cuts or (end > begin and begin - cuts[-1].begin >= size):
                cuts.append(Bucket(begin, self.size, []))
            cuts[-1].members.append(i)
        ends = [bucket.begin for bucket in cuts[1:]] + [self.size]
        return [bucket._replace(end=end) for bucket, end in zip(cuts, ends, strict=True)]

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A new flat buffer in main memory with the tensors' values."""
        flat = self.empty()
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            view.copy_(tensor.detach())
        return flat


def all_finite(stretches: Sequence[torch.Tensor]) -> bool:
    """Whether every number is finite."""
    for values in stretches:
        if values.dtype.is_floating_point or values.dtype.is_complex:
            # A sum is the quickest look, and is finite only if all are; it may also overflow where they are.
            wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
            if not bool(values.sum(dtype=wide).isfinite()) and not bool(values.isfinite().all()):
                return False
    return True
