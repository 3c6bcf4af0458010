"""Gradients beside what DistributedDataParallel does: the first step's reduction, the user's weights, norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from omnilearn.pytorch.reducer import packed
from omnilearn.pytorch.watch import Place
from omnilearn.pytorch.world import World


def by_hand(
    world: World,
    parameters: Sequence[nn.Parameter],
    group: Any,
    workers: Sequence[int],
    kind: torch.dtype | None,
    place: Place,
) -> None:
    """Add up the gradients of these parameters over the group; sent as ``kind``."""
    with world.naming_the_culprit(str(place)):
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            sent = packed(p.grad, kind)
            world.wait(dist.all_reduce(sent, group=group, async_op=True), place, workers)
            if sent is not p.grad:
                p.grad.copy_(sent)


def divide(module: nn.Module, total: torch.Tensor, assumed: int) -> None:
    """Gradients that were weighted for a sum of ``assumed``, made those for the sum that was reduced meanwhile."""
    factor = assumed / total
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for p in module.parameters():
        if p.grad is not None:
            if p.grad.is_sparse:
                p.grad.mul_(factor.to(p.grad.dtype))
            else:
                by_type.setdefault(p.grad.dtype, []).append(p.grad)
    for kind, same in by_type.items():
        torch._foreach_mul_(same, factor.to(kind if kind.is_floating_point else torch.float32))


def norms(gradients: list[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of each."""
    found = torch._foreach_norm(gradients, order)
    alike = all(norm.dtype == found[0].dtype for norm in found)
    return torch.stack(found if alike else [norm.to(torch.float64) for norm in found])
