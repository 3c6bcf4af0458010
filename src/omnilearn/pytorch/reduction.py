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


class Compressed:
    """DistributedDataParallel's buckets on their way as ``kind``: ``send`` is its hook, ``finish`` puts them back.

    Not by the future of the reduction: gloo's knows nothing of a card's streams. Gradients are views of the buckets.
    """

    def __init__(self, kind: torch.dtype) -> None:
        self._kind = kind
        self._pending: list[tuple[torch.Tensor, torch.Tensor, dist.Work]] = []

    def send(self, bucket: dist.GradBucket, group: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        sent = _packed(buffer, group.size(), self._kind)
        self._pending.append((buffer, sent, dist.all_reduce(sent, group=group, async_op=True)))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        done.set_result(buffer)
        return done

    def finish(self) -> None:
        """After the backward pass: the averages are the gradients."""
        for buffer, sent, work in self._pending:
            work.wait()
            buffer.copy_(sent)
        self._pending.clear()


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
