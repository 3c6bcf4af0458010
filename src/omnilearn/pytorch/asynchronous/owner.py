"""The server's side of a model: its parameters in one flat buffer, the user's own optimizer and schedulers on them.

Knows nothing of workers and messages; whoever calls it holds the server's lock.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from omnilearn.pytorch.asynchronous.job import Likeness
from omnilearn.pytorch.asynchronous.layout import ALIGNMENT, Layout
from omnilearn.pytorch.asynchronous.stretch import counting_as

WAYS = ("fused", "foreach", "capturable")
"""How an optimizer is run, which changes nothing but its speed."""


class Portrait:
    """What a module consists of, as both sides see it: trainable parameters, buffers, frozen parameters."""

    def __init__(self, module: nn.Module | Likeness) -> None:
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self.frozen = [p for p in module.parameters() if not p.requires_grad]
        self.buffers = list(module.buffers())
        self.values, self.rest, self.fixed = Layout(self.trainable), Layout(self.buffers), Layout(self.frozen)
        self.flags = -(-self.values.count // ALIGNMENT) * ALIGNMENT  # bytes; which gradients there are
        self.message = self.values.size + self.flags + self.rest.size  # bytes of a gradient with all that goes with it
        self.shared = self.values.size + self.message  # bytes of what both sides use where they share memory

    def copies(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All of it in main memory, flat."""
        return self.values.pack(self.trainable), self.rest.pack(self.buffers), self.fixed.pack(self.frozen)


def is_scheduler(other: Any) -> bool:
    """Whether it steers a learning rate: then the server has it. A GradScaler is each worker's own."""
    return hasattr(other, "step") and isinstance(getattr(other, "optimizer", None), torch.optim.Optimizer)


class Owner:
    """Parameters, buffers, optimizer, schedulers; ``version`` counts the updates."""

    def __init__(self, module: nn.Module | Likeness, optimizer: torch.optim.Optimizer, others: Sequence[Any]) -> None:
        self.module, self.optimizer, self.others = module, optimizer, others
        self.portrait = portrait = Portrait(module)
        self.values, self.buffers, self.frozen = portrait.copies()
        for tensors, layout, flat in (
            (portrait.trainable, portrait.values, self.values),
            (portrait.buffers, portrait.rest, self.buffers),
            (portrait.frozen, portrait.fixed, self.frozen),
        ):
            for tensor, view in zip(tensors, layout.views(flat), strict=True):
                tensor.data = view
        self._chosen = [{key: group[key] for key in WAYS if key in group} for group in optimizer.param_groups]
        self._choose_ways()
        self.version = 0
        self._credit = [0.0] * len(others)  # of a step that a scheduler will take when it is whole
        self._outside: dict[tuple[int, int], int] = {}  # scheduler steps between epochs: by epoch and scheduler

    def _choose_ways(self) -> None:
        """Ways to run on a card do not work here; where the user left it open, the fused way is the quickest."""
        real = all(p.is_floating_point() for group in self.optimizer.param_groups for p in group["params"])
        for group, chosen in zip(self.optimizer.param_groups, self._chosen, strict=True):
            fused = chosen.get("fused", False)
            wanted = fused or (fused is None and chosen.get("foreach") is None)
            ways = {"fused": wanted and real and not group.get("differentiable"), "capturable": False}
            group.update({key: value for key, value in ways.items() if key in group})

    # Updates

    def apply(
        self, gradients: Sequence[torch.Tensor], present: Sequence[int], weight: float = 1.0, steps: float = 1.0
    ) -> None:
        """One optimizer step with these gradients that counts as ``steps``, the learning rate times ``weight``."""
        for parameter, gradient, there in zip(self.portrait.trainable, gradients, present, strict=True):
            parameter.grad = gradient if there else None
        with counting_as(self.optimizer, steps, weight):
            self.optimizer.step()
        self.version += 1

    @property
    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_learning_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            if math.isfinite(rate) and rate >= 0:
                group["lr"] = torch.full_like(group["lr"], rate) if torch.is_tensor(group["lr"]) else rate

    def schedule(self, epoch: int, told: Any) -> None:
        """Steps of schedulers that a worker's loop made: inside by the samples behind them, outside once per epoch."""
        for i, other in enumerate(self.others):
            inside, outside, metric = (float(number) for number in told[i])
            if not is_scheduler(other):
                continue
            self._credit[i] += inside if 0 < inside < 1e6 else 0.0
            while self._credit[i] > 1 - 1e-6:
                self._credit[i] -= 1
                other.step()
            while outside > self._outside.get((epoch, i), 0):
                self._outside[epoch, i] = self._outside.get((epoch, i), 0) + 1
                other.step() if math.isnan(metric) else other.step(metric)

    def average_buffers(self, theirs: Sequence[torch.Tensor]) -> None:
        """Buffers in floating point (running statistics) are the mean of what the workers have."""
        if not theirs or not self.portrait.rest.size:
            return
        everybody = [self.portrait.rest.views(flat) for flat in theirs]
        for mine, *values in zip(self.portrait.rest.views(self.buffers), *everybody, strict=True):
            if not mine.is_floating_point() or all(torch.equal(value, values[0]) for value in values[1:]):
                mine.copy_(values[0])  # masks, tables, counters: those of the first worker
                continue
            mean = sum(value.to(torch.float64) for value in values) / len(values)
            mine.copy_(mean.to(mine.dtype))

    # Checkpoints

    def pack(self) -> dict[str, Any]:
        """A copy of everything, as the synchronous engine saves it."""
        state: dict[str, Any] = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "others": [other.state_dict() for other in self.others],
            "unused": None,
        }
        state = copy.deepcopy(state)
        for group, chosen in zip(state["optimizer"]["param_groups"], self._chosen, strict=True):
            group.update(chosen)
        return state

    def unpack(self, state: dict[str, Any]) -> None:
        if len(state["others"]) != len(self.others):
            raise ValueError(f"{len(state['others'])} objects were saved beside model and optimizer (schedulers, …), "
                             f"prepare() got {len(self.others)}")  # fmt: skip
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._choose_ways()
        for other, saved in zip(self.others, state["others"], strict=True):
            other.load_state_dict(saved)
        self._credit, self._outside = [0.0] * len(self.others), {}
