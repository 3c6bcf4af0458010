"""Gradients without DistributedDataParallel: the first step's reduction, the user's weights divided out, norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def by_hand(module: nn.Module, used: list[list[bool]], group: Any) -> None:
    """Average the gradients over the group, of all parameters that somebody has one of."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    for p, *anywhere in zip(parameters, *used, strict=True):
        if any(anywhere):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=group)
            p.grad /= len(used)


def divide(module: nn.Module, reduction: tuple[torch.Tensor, Any], assumed: int) -> None:
    """Gradients that were weighted for a sum of ``assumed``, made those for the sum that was reduced meanwhile."""
    total, work = reduction
    if work is not None:
        work.wait()
    factor = assumed / total
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for p in module.parameters():
        if p.grad is not None:
            by_type.setdefault(p.grad.dtype, []).append(p.grad)
    for kind, same in by_type.items():
        torch._foreach_mul_(same, factor.to(kind if kind.is_floating_point else torch.float32))


def norms(gradients: list[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of each."""
    found = torch._foreach_norm(gradients, order)
    alike = all(norm.dtype == found[0].dtype for norm in found)
    return torch.stack(found if alike else [norm.to(torch.float64) for norm in found])
