"""Is the gradient finite? Asked after every step, at next to no cost.

Where a bad step ends the run, some small tensors spread over the model are looked at: a loss that is not finite shows
in all of them, and a single layer that overflows does so one step later, through its weights. All of the gradient is
looked at now and then, and always where bad steps are to be left out. On a card the answer is read some steps later,
so that the host does not wait. Gradients are the same on all ranks after the reduction, so the answer is, too.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from typing import Any

import torch
from torch import nn

from omnilearn.pytorch import reduction

LATE = 4
"""Steps after which a check on the GPU is read."""
FEW = 8
ALL_EVERY = 50
SOUND = torch.tensor(True)


class Finite:
    """``late``: some workers compute on cards, so that all read an answer later, at the same step."""

    def __init__(self, module: nn.Module, every_time: bool, late: bool = False) -> None:
        self._parameters, self._every_time, self._late_too = list(module.parameters()), every_time, late
        self._count = 0
        self._few: list[nn.Parameter] = []
        self._late: deque[tuple[int, torch.Tensor, Any, torch.Tensor]] = deque()

    def check(self, step: int, loss: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """None, or the step whose gradient was not finite and its loss: this step, or one shortly before it."""
        gradients = self._looked_at()
        if not gradients:
            return None
        on_card = gradients[0].is_cuda
        if not on_card and isfinite(sum(map(float, torch._foreach_norm(gradients)))):
            finite = SOUND  # much the quickest on a CPU; squares may overflow where the gradient does not
        else:
            finite = reduction.norms(gradients, float("inf")).isfinite().all()
        if self._every_time or not (on_card or self._late_too):
            return None if bool(finite) else (step, loss)
        event = None
        if on_card:
            finite, answer = torch.empty((), dtype=torch.bool, pin_memory=True), finite
            finite.copy_(answer, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._late.append((step, finite, event, loss))
        return self.outstanding(keep=LATE)

    def outstanding(self, keep: int = 0) -> tuple[int, torch.Tensor] | None:
        """What the checks under way on a card say, but for the last ``keep``."""
        while len(self._late) > keep:
            step, answer, event, loss = self._late.popleft()
            if event is not None:
                event.synchronize()
            if not answer:
                self._late.clear()
                return step, loss
        return None

    def _looked_at(self) -> list[torch.Tensor]:
        everything = self._every_time or self._count % ALL_EVERY == 0
        self._count += 1
        few = [] if everything else [_dense(p.grad) for p in self._few if p.grad is not None]
        if few:
            return few
        used = [p for p in self._parameters if p.grad is not None]
        small = {id(p) for p in sorted(used, key=lambda p: p.numel())[: (len(used) + 1) // 2]}
        spread = [p for p in used if id(p) in small][:: -max(1, len(small) // FEW)]  # the last one first
        self._few = spread[:FEW]
        return [_dense(p.grad) for p in used if p.grad is not None]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Its numbers: of a sparse one, those that it has."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
