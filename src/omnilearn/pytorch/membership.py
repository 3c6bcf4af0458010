"""Who takes part in a step. The one seam: nothing else in the engine knows about groups.

Every rank walks through the same steps and calls ``enter`` where the set of workers changes: the members form a group
(a few are kept for the next time), and gradients are reduced anew for it. Those who come back receive the state of one
who was there. A set of one worker reduces nothing and has no group.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from omnilearn.engine.loop import Workers
from omnilearn.errors import PeerFailure, UsageError
from omnilearn.pytorch import parcel
from omnilearn.pytorch.reducer import Reducer
from omnilearn.pytorch.watch import Place
from omnilearn.pytorch.world import World

CHUNK = 4 * 2**20
"""Bytes per message: with larger ones, a peer that dies in the middle is noticed late."""
LET_GO = 5.0
"""Seconds that a thread has to end once its connection is broken."""
KEPT = 3
"""Sets of workers whose groups are kept beside that of all: each has connections and a thread on every member."""


class Membership:
    """The current set of workers, its group, and what reduces gradients over it."""

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
        # To reduce and to talk: the same where gloo does both. Those used last come last.
        self._groups: dict[Workers, tuple[Any, Any]] = {}
        self._alone: Any = None  # a group of this rank by itself, for layers that ask for one
        self._delivery: _Delivery | None = None  # of a training state, under way
        self.everybody: Workers = tuple(range(world.size))
        self.active: Workers = ()
        self.group: Any = None
        self.reducer: Reducer | None = None
        self.find_unused: bool | None = None  # None: not known yet; the next step's gradients show it

    @property
    def count(self) -> int:
        return len(self.active)

    @property
    def takes_part(self) -> bool:
        return self._world.rank in self.active

    def enter(self, active: Workers) -> None:
        """Make ``active`` the set of workers. Called by all ranks at the same step, where it changes."""
        self.active, self.reducer = active, None
        self._form(active)
        if self.takes_part:
            self.group = self._groups[active][0] if len(active) > 1 else None
            self.wrap()

    def wrap(self) -> None:
        """Begin anew to reduce over the current group."""
        if not self.takes_part:
            return
        self.reducer = None  # the old one lets go of the parameters' hooks first
        for layer in self._module.modules():
            if isinstance(layer, nn.SyncBatchNorm):
                layer.process_group = self.group or self._by_itself()
        if self.count > 1 and self.find_unused is not None and any(p.requires_grad for p in self._module.parameters()):
            talk = self.talk(self.active)
            self.reducer = Reducer(
                self._world, self._module, self.group, talk, self.active, self.find_unused, self._compress
            )

    def _by_itself(self) -> Any:
        """No group would mean all ranks to such a layer, the parked too."""
        if self._alone is None and self._world.size > 1:
            self._alone = dist.new_group([self._world.rank], backend="gloo", use_local_synchronization=True)
        return self._alone

    def close(self) -> None:
        """Let go of all groups. Left to the garbage collector, a DataLoader's fork may hang in destroying them."""
        self.end_threads()
        self.reducer = self.group = None
        for layer in self._module.modules():
            if isinstance(layer, nn.SyncBatchNorm):
                layer.process_group = None
        self._groups.clear()
        self._alone = None
        gc.collect()

    def end_threads(self) -> None:
        if self._delivery is not None:
            self._delivery.drop()
            self._delivery = None

    def knows(self, workers: Workers) -> bool:
        """Whether there is a group of these, on all ranks alike; one worker needs none."""
        return len(workers) < 2 or workers == self.everybody or workers in self._groups

    def meet(self, place: Place, workers: Workers, payload: bytes = b"") -> list[bytes]:
        """What each of these workers brings, once all are in the same place. A rank that is none of them goes on."""
        if len(workers) < 2 or self._world.rank not in workers:
            return [payload]
        return self._world.meet(place, self.talk(workers), workers, payload)

    def talk(self, workers: Workers) -> Any:
        """A gloo group of these workers, for values on the CPU (None: one worker needs none)."""
        if workers == self.everybody:
            return self._world.control
        return self._groups[workers][1] if len(workers) > 1 else None

    def _form(self, workers: Workers) -> None:
        """Form the groups of these workers, as few as possible: gloo wakes up 100 times a second for each.

        On all ranks: torch numbers groups, and with use_local_synchronization by those a rank is itself in, so that
        members with different pasts would wait for each other under different names.
        """
        if len(workers) < 2:
            return
        if workers in self._groups:
            self._groups[workers] = self._groups.pop(workers)
            return
        with self._world.naming_the_culprit("forming a group of workers"):
            ranks, timeout, backend = list(workers), self._world.timeout, self._world.backend
            apart = workers != self.everybody
            talk = dist.new_group(ranks, backend="gloo", timeout=timeout) if apart else self._world.control
            reduce = talk if backend == "gloo" else dist.new_group(ranks, backend=backend, timeout=timeout)
        self._groups[workers] = reduce, talk
        others = [known for known in self._groups if known not in (workers, self.everybody)]
        for known in others[: max(len(others) + 1 - KEPT, 0)]:
            self._free(known)

    def _free(self, workers: Workers) -> None:
        """On all ranks at the same step: a set that was not used for the longest time."""
        for group in dict.fromkeys(self._groups.pop(workers)):
            dist.destroy_process_group(group)

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
            self._take(parcel.unpack(blob))
        if after is not None:
            self._delivery = _Delivery(works, after, self._world)

    def _receive(self, before: int, after: int | None) -> tuple[torch.Tensor, list[Any]]:
        """What comes from the one before, which is sent on at once to the one after, if there is one."""
        length = torch.zeros(1, dtype=torch.int64)
        what, control = f"receiving the training state from rank {before}", self._world.control
        with self._world.naming_the_culprit(what):
            self._world.listen(dist.irecv(length, before, group=control), what, before, patient=True)
            works = [self._send(length, after)]
            blob = torch.empty(int(length), dtype=torch.uint8)
            for chunk in blob.split(CHUNK):
                self._world.listen(dist.irecv(chunk, before, group=control), what, before, patient=True)
                works.append(self._send(chunk, after))
        return blob, works

    def _take(self, state: Any) -> None:
        try:
            self._unpack(state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"rank {self._world.rank} was parked, and the training state of the others does not fit it any more: "
                f"what changes a model or an optimizer (new layers, parameter groups) belongs between epochs, where "
                f"all workers do it ({error})"
            ) from error

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
        self._under_way: Any = None
        self._timeout = world.timeout
        self._error: Exception | None = None
        with contextlib.suppress(RuntimeError):  # at the end of a script there are no new threads from Python 3.12 on
            self.start()

    def run(self) -> None:
        try:
            with self._world.naming_the_culprit(_sending(self._target)):
                while self._works:
                    self._under_way = self._works.popleft()
                    self._under_way.wait(self._timeout)
        except Exception as error:
            self._error = error
            self._works.clear()

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
        """Give up: what is under way keeps connections open. The thread ends, too: Python aborts a process that ends
        while one of its threads waits in C++."""
        self._works.clear()
        if self.ident is not None and self.is_alive() and self._under_way is not None:
            with contextlib.suppress(RuntimeError):  # a wait that runs out of time breaks the connection
                self._under_way.wait(timedelta(milliseconds=1))
            self.join(LET_GO)
