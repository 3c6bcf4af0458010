"""What prepare returns: the model as the user knows it, and an optimizer and scheduler that act once per step."""

from __future__ import annotations

from collections.abc import Callable
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
        self._calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._calls += 1
        wrapped = self._membership.wrapped
        return (wrapped or self.module)(*args, **kwargs)

    def used(self) -> bool:
        """Whether the model was called since this was last asked."""
        calls, self._calls = self._calls, 0
        return calls > 0

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

    (torch's own schedulers wrap ``optimizer.step`` the same way.)
    """
    act = getattr(target, method)

    def gated(*args: Any, **kwargs: Any) -> Any:
        if not allowed():
            return None
        result = act(*args, **kwargs)
        if after is not None:
            after()
        return result

    # What schedulers and GradScaler look for on the method they find.
    gated.__dict__.update(getattr(act, "__dict__", {}))
    gated.__wrapped__ = act  # type: ignore[attr-defined]
    setattr(target, method, gated)


def smallest_batch(module: nn.Module) -> int:
    """The least batch the model can train on: 2 where a BatchNorm needs more than one value per channel."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return 2 if any(isinstance(layer, norms) and layer.training for layer in module.modules()) else 1


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """What has to be the same on all ranks for gradients to be added up."""
    return {name: (tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()} | {
        name: (tuple(b.shape), str(b.dtype)) for name, b in module.named_buffers()
    }
