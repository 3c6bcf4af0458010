"""A worker as the server knows it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch

from omnilearn.cluster.resources import Resources
from omnilearn.data.leases import Lease
from omnilearn.pytorch.asynchronous.owner import Portrait
from omnilearn.pytorch.asynchronous.wire import BUCKET, Pair


@dataclass(eq=False)
class Member:
    rank: int
    where: str
    resources: Resources
    pair: Pair
    inbox: torch.Tensor  # its gradients, flags and buffers
    outbox: torch.Tensor | None  # the parameters of an answer, where memory is shared
    shared: bool  # the worker has both boxes in its own memory too: nothing in them is sent
    gradients: list[torch.Tensor]
    buckets: list[torch.Tensor]  # what comes ahead of a push; nothing where memory is shared
    flags: torch.Tensor
    theirs: torch.Tensor
    numbers: list[torch.Tensor]
    epoch: int = -1  # the one it is in or was in last; at first the one before that which it joins
    begun: bool = False
    late: bool = False  # it joined others who had begun, and has not begun itself
    meetings: int = 0  # since it began the epoch
    generation: int = 0  # of its leases
    held: deque[Lease] = field(default_factory=deque)
    buffers: torch.Tensor | None = None
    heard: float = field(default_factory=time.monotonic)
    pace: float = 0.0  # seconds of its last step
    steps: int = 0
    told: int = -1  # the plan it was told
    left: bool = False  # it broke out of the epoch's loop
    lost: bool = False  # silent for too long: its leases were given back
    busy: bool = False  # its message is being answered

    @staticmethod
    def of(
        rank: int, where: str, resources: Resources, pair: Pair, layout: Portrait, memory: torch.Tensor | None
    ) -> Member:
        """One that has connected, with the memory for what it will send: shared with it, where there is such."""
        values, flags = layout.values.size, layout.flags
        inbox = torch.zeros(layout.message, dtype=torch.uint8) if memory is None else memory[values:]
        numbers = inbox[:values]
        return Member(
            rank, where, resources, pair, inbox,
            outbox=None if memory is None else memory[:values],
            shared=memory is not None,
            gradients=layout.values.views(numbers),
            buckets=[numbers[b.begin : b.end] for b in layout.values.buckets(BUCKET)] if memory is None else [],
            flags=inbox[values : values + layout.values.count],
            theirs=inbox[values + flags :],
            numbers=layout.values.stretches(numbers),
        )  # fmt: skip

    @property
    def computes(self) -> bool:
        return bool(self.held) and not self.lost
