"""Gradients laid aside, so that nothing the script does to ``p.grad`` meanwhile can lose them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Held:
    """Of these parameters. Empty until ``lay_aside``, and again after ``put_back`` or ``add_back``."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._gradients: list[torch.Tensor | None] | None = None

    def __bool__(self) -> bool:
        return self._gradients is not None

    def lay_aside(self, *, copy: bool = False) -> None:
        """Take the gradients out of ``p.grad``. ``copy``: their memory may be used again, as that of buckets is."""
        found = [p.grad for p in self._parameters]
        if all(gradient is None for gradient in found):
            return
        self._gradients = [g.clone() if copy and g is not None else g for g in found]
        for p in self._parameters:
            p.grad = None

    def put_back(self) -> None:
        """Where something was laid aside, ``p.grad`` is again what it was, whatever it has become meanwhile."""
        held, self._gradients = self._gradients, None
        if held is not None:
            for p, gradient in zip(self._parameters, held, strict=True):
                p.grad = gradient

    @torch.no_grad()
    def add_back(self) -> None:
        """What was laid aside is added to what is there now."""
        held, self._gradients = self._gradients, None
        for p, gradient in zip(self._parameters, held or (), strict=False):
            if gradient is not None:
                p.grad = gradient if p.grad is None else p.grad.add_(gradient)

    def gradients(self) -> list[torch.Tensor | None]:
        return list(self._gradients or ())

    def drop(self) -> None:
        self._gradients = None
