"""A worker's model and the flat buffers that its gradients and parameters travel in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from omnilearn.pytorch.asynchronous import shared, wire
from omnilearn.pytorch.asynchronous.gradient import Gradient
from omnilearn.pytorch.asynchronous.owner import Portrait
from omnilearn.pytorch.asynchronous.wire import Pair


class Tensors:
    """Where the device is the CPU, parameters *are* windows on the buffer that is received into.

    With ``memory`` that the server shares, nothing is received or sent: it writes the parameters there, while this
    worker waits for its answer, and reads gradients and buffers from behind them.
    """

    def __init__(self, module: nn.Module, device: torch.device, memory: torch.Tensor | None = None) -> None:
        self._portrait = portrait = Portrait(module)
        self.trainable, self._device = portrait.trainable, device
        on_card = device.type != "cpu"
        values, flags, self.shared = portrait.values.size, portrait.flags, memory is not None
        self._unpin = shared.pin(memory) if device.type == "cuda" and memory is not None else lambda: None
        if memory is None:
            memory = torch.zeros(portrait.shared, dtype=torch.uint8, pin_memory=on_card)
        self._arrived, self._outbox = memory[:values], memory[values:]
        self._values = portrait.values.empty(device) if on_card else self._arrived
        self._numbers, self._flags = self._outbox[:values], self._outbox[values : values + portrait.values.count]
        self._rest = self._outbox[values + flags :]
        self._gathered = portrait.rest.empty(device) if on_card else self._rest
        self._windows = portrait.rest.views(self._gathered)
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters that lie in memory in another way
        for parameter, view in zip(self.trainable, portrait.values.views(self._values), strict=True):
            view.copy_(parameter.detach())
            if parameter.is_contiguous():
                parameter.data = view
            else:
                self._aside.append((parameter.data, view))

    def gradient(self, pair: Pair) -> Gradient:
        """Where gradients leave from, for that server."""
        send = None if self.shared else pair.send_ahead
        return Gradient(self.trainable, self._portrait.values, self._numbers, self._device, send)

    def beside(self, present: Sequence[bool]) -> list[torch.Tensor]:
        """What goes with a gradient: which of its tensors there are, and the buffers."""
        self._flags.copy_(torch.tensor(present, dtype=torch.uint8))
        self.buffers()
        return [] if self.shared else [self._outbox[len(self._numbers) :]]

    def buffers(self) -> list[torch.Tensor]:
        if self._windows:
            torch._foreach_copy_(self._windows, [buffer.detach() for buffer in self._portrait.buffers])
            if self._gathered is not self._rest:
                self._rest.copy_(self._gathered)
        return [self._rest] if len(self._rest) and not self.shared else []

    def receive(self, pair: Pair, parts: int) -> None:
        """What the header announced, straight into the parameters' memory."""
        if parts & wire.VALUES:
            if not self.shared:
                pair.receive([self._arrived])
            if self._arrived is not self._values:
                self._values.copy_(self._arrived, non_blocking=True)
            for tensor, view in self._aside:
                tensor.copy_(view)
        for part, layout, tensors in (
            (wire.BUFFERS, self._portrait.rest, self._portrait.buffers),
            (wire.FROZEN, self._portrait.fixed, self._portrait.frozen),
        ):
            if parts & part and layout.size:
                flat = layout.empty()
                pair.receive([flat])
                for view, tensor in zip(layout.views(flat), tensors, strict=True):
                    tensor.data.copy_(view)

    def close(self) -> None:
        """Nothing travels any more."""
        self._unpin()
        self._unpin = lambda: None
