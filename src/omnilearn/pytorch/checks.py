"""What a user may give to ``OmniLearn`` and ``prepare``, said before anything starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from omnilearn.errors import InfeasibleError, UsageError
from omnilearn.pytorch import checkpoint
from omnilearn.pytorch.reducer import COMPRESSED


def options(mode: str, compress: str | None, lease_timeout: float, join: str | None) -> None:
    """Those that only PyTorch has."""
    if compress is not None and compress not in COMPRESSED:
        raise InfeasibleError(f"unknown compression {compress!r}: use {', '.join(map(repr, COMPRESSED))} or None")
    if compress is not None and mode == "async":
        raise InfeasibleError(f"compress={compress!r} is for mode='sync': leave it out")
    if not lease_timeout > 0:
        raise InfeasibleError(f"lease_timeout must be positive, got {lease_timeout}")
    if mode == "sync" and join is not None:
        raise InfeasibleError("join belongs to mode='async': leave it out, or set the mode")


def prepared(model: Any, optimizer: Any, others: tuple[Any, ...], micro_batch: int | None) -> None:
    """``micro_batch``: where there are several workers."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"prepare(model, optimizer[, scheduler]) got {type(model).__name__} and {type(optimizer).__name__}"
        )
    for other in others:
        if not hasattr(other, "state_dict") or not hasattr(other, "load_state_dict"):
            raise UsageError(
                f"prepare(model, optimizer, …) got a {type(other).__name__}: what comes third must have state_dict "
                f"and load_state_dict, as schedulers and GradScalers do"
            )
        checkpoint.plain(other.state_dict(), (f"the state of {type(other).__name__}",))
    if micro_batch and any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        raise InfeasibleError(
            f"micro_batch={micro_batch} with SyncBatchNorm: shares differ, and so would the number of passes "
            f"that all workers have to make together: use max_batch, or BatchNorm"
        )
    known = {id(p) for p in model.parameters()}
    strangers = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise UsageError(
            f"the optimizer holds {strangers} parameters that are not the model's: build it from the parameters of "
            f"the model given to prepare()"
        )
