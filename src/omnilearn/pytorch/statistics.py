"""Buffers that training changes: BatchNorm's running statistics, and what else a model keeps for itself.

Every worker sees other samples, so theirs are averaged at the end of an epoch, before an evaluation and in a
checkpoint: those in floating point, each in its own type. Everything else (masks, tables, complex numbers) is left
alone, and compared once.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from omnilearn.pytorch.membership import Membership
from omnilearn.pytorch.world import World

log = logging.getLogger("omnilearn")

COUNTER = "num_batches_tracked"
_NORMS = (nn.modules.batchnorm._BatchNorm,)  # torch updates theirs without counting it as a new version


class Statistics:
    """Of one model."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._first = {name: (id(b), b._version) for name, b in module.named_buffers()}
        self._compared = False
        self._norms = {
            f"{prefix}.{name}" if prefix else name
            for prefix, layer in module.named_modules()
            if isinstance(layer, _NORMS)
            for name, _ in layer.named_buffers(recurse=False)
        }

    def moving(self) -> dict[str, torch.Tensor]:
        """Buffers that passes have changed, as far as can be told, by name."""
        return {
            name: buffer
            for name, buffer in self._module.named_buffers()
            if name in self._norms or self._first.get(name) != (id(buffer), buffer._version)
        }

    def _counters(self) -> list[torch.Tensor]:
        """BatchNorm's numbers of batches."""
        return [b for name, b in self._module.named_buffers() if name in self._norms and name.endswith(COUNTER)]

    def average(self, world: World, membership: Membership, workers: Sequence[int]) -> None:
        """Over these workers, of which this rank is one: all have the same afterwards."""
        buffers = dict(self._module.named_buffers())
        if len(workers) < 2 or not buffers:
            return
        group, place = membership.talk(tuple(workers)), world.place("averaging buffers")
        moving, counters = self.moving(), self._counters()
        mine = [name in moving for name in buffers], [int(counter) for counter in counters], self._compare(buffers)
        told = [json.loads(part) for part in world.meet(place, group, workers, json.dumps(mine).encode())]
        changed = [any(flags) for flags in zip(*(flags for flags, _, _ in told), strict=True)]
        for k, counter in enumerate(counters):  # the same on all, as everything else
            counter.fill_(max(counts[k] for _, counts, _ in told))
        if len({digest for *_, digest in told}) > 1:
            log.warning("buffers that are no numbers in floating point differ between workers (among %s): they are "
                        "left as they are on each", ", ".join(_fixed(buffers))[:200])  # fmt: skip
        alike: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer, moves in zip(buffers.values(), changed, strict=True):
            if moves and buffer.is_floating_point() and buffer.numel():
                alike.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad(), world.naming_the_culprit(str(place)):
            for kind, same in alike.items():
                # All in one message: a deep network has hundreds of them, and each would cost a round trip.
                exact = kind if kind.itemsize >= 4 else torch.float32
                values = torch.cat([buffer.detach().flatten().to(exact) for buffer in same]).cpu()
                world.wait(dist.all_reduce(values, group=group, async_op=True), place, workers)
                means = (values / len(workers)).to(same[0].device).split([buffer.numel() for buffer in same])
                for buffer, mean in zip(same, means, strict=True):
                    buffer.copy_(mean.view_as(buffer))

    def _compare(self, buffers: dict[str, torch.Tensor]) -> str:
        """The first time, a hash of what is left alone."""
        if self._compared:
            return ""
        self._compared = True
        digest = hashlib.blake2b(digest_size=16)
        for name in _fixed(buffers):
            digest.update(buffers[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _fixed(buffers: dict[str, torch.Tensor]) -> list[str]:
    """What is never averaged, but for counters of passes, which may differ."""
    return [
        name for name, b in buffers.items()
        if not b.is_floating_point() and b.numel() and not name.endswith(COUNTER)
    ]  # fmt: skip
