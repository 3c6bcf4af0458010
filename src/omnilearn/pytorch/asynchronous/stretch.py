"""An optimizer step that counts as more or less than one: for the gradient of a large batch, or of a small one.

What torch's optimizers forget with every step (SGD's momentum, the averages of Adam and its kin) is forgotten as in so
many steps. Optimizers that say neither ``dampening`` nor ``betas`` get the learning rate of so many steps, no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def counting_as(optimizer: torch.optim.Optimizer, steps: float, weight: float = 1.0) -> Iterator[None]:
    """A step in here counts as so many, with ``weight`` times the learning rate; the options come back afterwards."""
    changes = [{**_stretched(group, steps), "lr": group["lr"] * steps * weight} for group in optimizer.param_groups]
    before = [
        {key: group[key] for key in change} for group, change in zip(optimizer.param_groups, changes, strict=True)
    ]
    _update(optimizer, changes)
    # Adam corrects its averages for how few steps they are of, by powers of the betas: those of longer steps now.
    _scale_counts(optimizer, 1 / steps)
    try:
        yield
    finally:
        _scale_counts(optimizer, steps)
        _update(optimizer, before)


def _update(optimizer: torch.optim.Optimizer, options: Sequence[dict[str, Any]]) -> None:
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)


def _stretched(group: dict[str, Any], steps: float) -> dict[str, Any]:
    """Options with which an average after one step is what it would be after so many with the same gradient."""
    if "betas" in group:
        return {"betas": tuple(beta**steps for beta in group["betas"])}
    momentum = group.get("momentum", 0)
    if "dampening" not in group or not 0 < momentum < 1:
        return {}
    kept = momentum**steps
    return {"momentum": kept, "dampening": 1 - (1 - group["dampening"]) * (1 - kept) / (1 - momentum)}


def _scale_counts(optimizer: torch.optim.Optimizer, factor: float) -> None:
    if factor == 1:
        return
    groups = (group for group in optimizer.param_groups if "betas" in group)
    states = (optimizer.state[p] for group in groups for p in group["params"] if p in optimizer.state)
    counts = [state["step"] for state in states if torch.is_tensor(state.get("step"))]
    if counts:
        torch._foreach_mul_(counts, factor)
