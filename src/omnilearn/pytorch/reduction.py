"""Gradients beside what DistributedDataParallel does: the first step's reduction, fewer bits, weights, norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

COMPRESSED = {"bf16": torch.bfloat16}
"""What gradients may be sent as, by the names that users give."""


def _packed(gradient: torch.Tensor, count: int, kind: torch.dtype | None) -> torch.Tensor:
    """This worker's part of an average over ``count``, as it is sent: divided before it loses bits, in place."""
    gradient /= count
    fewer = kind is not None and gradient.is_floating_point() and gradient.itemsize > kind.itemsize
    return gradient.to(kind) if fewer else gradient


def bucket(gradients: dist.GradBucket, group: Any, kind: torch.dtype) -> torch.futures.Future[torch.Tensor]:
    """A hook of DistributedDataParallel: the bucket is averaged over the group, but sent and added up as ``kind``."""
    buffer = gradients.buffer()
    sent = _packed(buffer, group.size(), kind)
    future = dist.all_reduce(sent, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def by_hand(module: nn.Module, used: list[list[bool]], group: Any, kind: torch.dtype | None) -> None:
    """Average the gradients over the group, of all parameters that somebody has one of; sent as ``kind``."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    for p, *anywhere in zip(parameters, *used, strict=True):
        if any(anywhere):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            sent = _packed(p.grad, len(used), kind)
            dist.all_reduce(sent, group=group)
            p.grad.copy_(sent)


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
