"""What prepare returns: the model as the user knows it, and an optimizer and scheduler that act once per step."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from omnilearn.pytorch.membership import Membership


class OmniModel(nn.Module):
    """The user's model, reduced over whoever takes part in the step.

    Attributes, ``state_dict`` and ``load_state_dict`` are the inner model's own, without prefixes; ``.module`` is it.
    """

    def __init__(self, module: nn.Module, membership: Membership) -> None:
        super().__init__()
        self.module = module
        object.__setattr__(self, "_membership", membership)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._membership.called = True  # written, never read here: torch.compile would specialise on it
        wrapped = self._membership.wrapped
        if wrapped is None:
            return self.module(*args, **kwargs)
        with self._membership.guard("computing"):  # DDP agrees on its buckets in a forward pass
            return wrapped(*args, **kwargs)

    def used(self) -> bool:
        """Whether the model was called since this was last asked."""
        called, self._membership.called = self._membership.called, False
        return called

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


def gate(target: Any, method: str, allowed: Callable[[], bool], after: Callable[[], None] | None = None) -> None:
    """Have ``target.method()`` do its work only where ``allowed()``, on the very object the user holds.

    By a subclass of its own class, so that nothing is added to what a scheduler's ``state_dict`` saves; where an object
    has the method for itself already (torch's schedulers wrap ``optimizer.step`` that way), on the object.
    """
    act = getattr(target, method)

    def gated(_: Any, *args: Any, **kwargs: Any) -> Any:
        if not allowed():
            return None
        result = act(*args, **kwargs)
        if after is not None:
            after()
        return result

    # What schedulers and GradScaler look for on the method they find.
    gated.__dict__.update(getattr(act, "__dict__", {}))
    gated.__wrapped__ = act  # type: ignore[attr-defined]
    if method in vars(target):
        setattr(target, method, MethodType(gated, target))
    else:
        kind = type(target)
        target.__class__ = type(kind.__name__, (kind,), {method: gated, "__module__": kind.__module__})


def smallest_batch(module: nn.Module) -> int:
    """The least batch the model can train on: 2 where a BatchNorm needs more than one value per channel."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return 2 if any(isinstance(layer, norms) for layer in module.modules()) else 1


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """What has to be the same on all ranks for gradients to be added up."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    shapes = {name: (tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters.items()}
    return shapes | {name: (tuple(b.shape), str(b.dtype)) for name, b in buffers.items()}
