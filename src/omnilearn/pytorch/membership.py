"""Who takes part in a step. The one seam: nothing else in the engine knows about groups.

Every rank walks through the same steps and calls ``enter`` where the set of workers changes: the members form a group
(kept for the next time), and the model is wrapped anew for it. Those who come back receive the state of one who was
there. A set of one worker reduces nothing and has no group.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from omnilearn.engine.loop import Workers
from omnilearn.errors import PeerFailure
from omnilearn.pytorch import parcel, reduction
from omnilearn.pytorch.world import World

CHUNK = 4 * 2**20
"""Bytes per message: with larger ones, a peer that dies in the middle is noticed late."""

BUFFERS_IN_FORWARD = "forward_sync_buffers"  # torch 2.13's new name for it
if BUFFERS_IN_FORWARD not in inspect.signature(DistributedDataParallel.__init__).parameters:
    BUFFERS_IN_FORWARD = "broadcast_buffers"


class Membership:
    """The current set of workers, its group, and the model wrapped for it."""

    def __init__(
        self,
        world: World,
        module: nn.Module,
        pack: Callable[[], Any],
        unpack: Callable[[Any], None],
        compress: torch.dtype | None = None,
    ) -> None:
        self._world, self._module, self._compress = world, module, compress
        self._pack, self._unpack = pack, unpack
        self.guard = world.naming_the_culprit
        self._groups: dict[Workers, tuple[Any, Any]] = {}  # to reduce and to talk: the same where gloo does both
        self._delivery: _Delivery | None = None  # of a training state, under way
        self.everybody: Workers = tuple(range(world.size))
        self.active: Workers = ()
        self.group: Any = None
        self.wrapped: DistributedDataParallel | None = None
        self.compressed: reduction.Compressed | None = None  # what is on its way in fewer bits
        self.called = False  # the model, since it was last asked: here, as an attribute of a module is slow to set
        self.find_unused: bool | None = None  # None: not known yet, nothing is wrapped

    @property
    def count(self) -> int:
        return len(self.active)

    @property
    def takes_part(self) -> bool:
        return self._world.rank in self.active

    def enter(self, active: Workers) -> None:
        """Make ``active`` the set of workers. Called by all ranks at the same step, where it changes."""
        self.active, self.wrapped = active, None
        self._form(active)
        if self.takes_part:
            self.group = self._groups[active][0] if len(active) > 1 else None
            self.wrap()

    def wrap(self) -> None:
        """Wrap the model for the current group (again)."""
        if not self.takes_part:
            return
        self.wrapped = None  # the old one lets go of the parameters' hooks first
        for layer in self._module.modules():
            if isinstance(layer, nn.SyncBatchNorm):
                layer.process_group = self.group
        if self.count > 1 and self.find_unused is not None and any(p.requires_grad for p in self._module.parameters()):
            device = self._world.device
            self.wrapped = DistributedDataParallel(
                self._module,
                process_group=self.group,
                device_ids=[device.index] if device.type == "cuda" else None,
                init_sync=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=self.find_unused,
                **{BUFFERS_IN_FORWARD: False},
            )
            if self._compress is not None:
                group = self.group
                self.compressed = compressed = reduction.Compressed(self._compress)
                # A lambda: torch refuses hooks whose annotations are strings.
                self.wrapped.register_comm_hook(None, lambda _, bucket: compressed.send(bucket, group))

    def close(self) -> None:
        """Let go of all groups. Left to the garbage collector, a DataLoader's fork may hang in destroying them."""
        self.wrapped = self.group = None
        if self._delivery is not None:
            self._delivery.drop()
            self._delivery = None
        self._groups.clear()
        gc.collect()

    def talk(self, workers: Workers) -> Any:
        """A gloo group of these workers, for values on the CPU (None: one worker needs none)."""
        if workers == self.everybody:
            return self._world.control
        return self._groups[workers][1] if len(workers) > 1 else None

    def _form(self, workers: Workers) -> None:
        """Form the groups of these workers, once, and as few as possible: gloo wakes up 100 times a second for each.

        On all ranks: torch numbers groups, and with use_local_synchronization by those a rank is itself in, so that
        members with different pasts would wait for each other under different names.
        """
        if len(workers) < 2 or workers in self._groups:
            return
        with self._world.naming_the_culprit("forming a group of workers"):
            ranks, timeout, backend = list(workers), self._world.timeout, self._world.backend
            apart = workers != self.everybody
            talk = dist.new_group(ranks, backend="gloo", timeout=timeout) if apart else self._world.control
            reduce = talk if backend == "gloo" else dist.new_group(ranks, backend=backend, timeout=timeout)
        self._groups[workers] = reduce, talk

    def hand_over(self, source: int, targets: Sequence[int]) -> None:
        """Send the training state from ``source`` along the line of ``targets``. Other ranks do nothing.

        Everybody sends it once at most, and nobody waits until it has arrived: ``flush`` does. Who receives it has it
        when this returns.
        """
        line = (source, *targets)
        if not targets or self._world.rank not in line:
            return
        self.flush()  # what was sent the last time
        at = line.index(self._world.rank)
        after = line[at + 1] if at + 1 < len(line) else None
        if at == 0:
            blob = parcel.pack(self._pack())
            works = [self._send(piece, after) for piece in (torch.tensor([len(blob)]), *blob.split(CHUNK))]
        else:
            blob, works = self._receive(line[at - 1], after)
            self._unpack(parcel.unpack(blob))
        if after is not None:
            self._delivery = _Delivery(works, after, self._world)

    def _receive(self, before: int, after: int | None) -> tuple[torch.Tensor, list[Any]]:
        """What comes from the one before, which is sent on at once to the one after, if there is one."""
        length = torch.zeros(1, dtype=torch.int64)
        with self._world.naming_the_culprit(f"receiving the training state from rank {before}"):
            dist.recv(length, before, group=self._world.control)
            works = [self._send(length, after)]
            blob = torch.empty(int(length), dtype=torch.uint8)
            for chunk in blob.split(CHUNK):
                dist.recv(chunk, before, group=self._world.control)
                works.append(self._send(chunk, after))
        return blob, works

    def _send(self, piece: torch.Tensor, target: int | None) -> Any:
        if target is None:
            return None
        with self._world.naming_the_culprit(_sending(target)):
            return dist.isend(piece, target, group=self._world.control)

    def flush(self) -> None:
        """Wait until the training state that was sent has arrived."""
        if self._delivery is not None:
            self._delivery.wait()
            self._delivery = None


def _sending(target: int) -> str:
    return f"sending the training state to rank {target}"


class _Delivery(threading.Thread):
    """Lets go of what was sent, piece by piece, as it arrives; nobody else has to wait for that."""

    def __init__(self, works: Sequence[Any], target: int, world: World) -> None:
        super().__init__(name="omnilearn-delivery", daemon=True)
        self._works, self._target, self._world = deque(works), target, world
        self._timeout = world.timeout
        self._error: Exception | None = None
        with contextlib.suppress(RuntimeError):  # at the end of a script there are no new threads from Python 3.12 on
            self.start()

    def run(self) -> None:
        try:
            with self._world.naming_the_culprit(_sending(self._target)):
                while self._works:
                    self._works.popleft().wait(self._timeout)
        except Exception as error:
            self._error = error
            self.drop()

    def wait(self) -> None:
        if self.ident is None:
            self.run()
        else:
            limit = self._world.timeout.total_seconds()
            self.join(limit)
            if self.is_alive():  # at the end of a script there is less patience than when it began
                self.drop()
                raise PeerFailure(f"rank {self._target} has not taken the training state for {limit:g} s")
        if self._error is not None:
            raise self._error

    def drop(self) -> None:
        """Give up: what is under way keeps connections open."""
        self._works.clear()
