"""Rows of timings on their way to one rank, the thinker, and its answers on the way back.

Messages from rank to rank with tags of their own: nothing that the ranks say to each other meanwhile is mixed up with
them, and a slow rank is woken up for its own two only, not for what others tell each other. A rank that is not waited
for may be behind by several exchanges: its rows and answers wait for it, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from omnilearn.engine.peers import Floats

if TYPE_CHECKING:
    from omnilearn.pytorch.world import World

TELLING = "exchanging timings"


class Exchange:
    """One exchange, as every rank sees it."""

    def __init__(self, world: World, row: Floats, thinker: int) -> None:
        self._world, self._row, self._thinker = world, row, thinker
        if world.rank == thinker:
            if not world.mail:
                world.mail.update({rank: Mail(world, rank) for rank in range(world.size) if rank != thinker})
            for mail in world.mail.values():
                mail.expect(len(row))
        else:
            work = dist.isend(torch.from_numpy(row), thinker, group=world.control, tag=world.tags[0])
            world.sent.append((work, thinker))
            self._length = torch.zeros(1, dtype=torch.int64)  # of the answer, which comes after it
            self._coming = self._receive(self._length)

    def rows(self, awaited: Collection[int]) -> Floats:
        table = np.full((self._world.size, len(self._row)), np.nan)
        table[self._thinker] = self._row
        for rank, mail in self._world.mail.items():
            row = mail.newest(wait=rank in awaited)
            if row is not None:
                length = min(len(row), len(self._row))
                table[rank, :length] = row[:length]
            if mail.behind:
                table[rank, -1] = np.nan
        return table

    def answer(self, data: bytes) -> None:
        for mail in self._world.mail.values():
            mail.tell(data)

    def heard(self) -> bytes:
        self._wait(self._coming)
        data = torch.empty(int(self._length), dtype=torch.uint8)
        if len(data):
            self._wait(self._receive(data))
        return data.numpy().tobytes()

    def _receive(self, tensor: torch.Tensor) -> Any:
        return dist.irecv(tensor, self._thinker, group=self._world.control, tag=self._world.tags[1])

    def _wait(self, work: Any) -> None:
        """As long as the thinker is alive: a parked worker waits for whatever the others do meanwhile."""
        with self._world.naming_the_culprit(f"{TELLING} with rank {self._thinker}"):
            self._world.listen(work, TELLING, self._thinker, mutual=True, patient=True)


class Mail:
    """On the thinker: what is under way from and to one other rank."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._coming: deque[tuple[torch.Tensor, Any]] = deque()  # rows, the oldest first
        self._sent: list[Any] = []  # answers

    def expect(self, length: int) -> None:
        row = torch.full((length,), float("nan"), dtype=torch.float64)
        with self._naming():
            work = dist.irecv(row, self._rank, group=self._world.control, tag=self._world.tags[0])
        self._coming.append((row, work))

    @property
    def behind(self) -> bool:
        """Whether rows are still to come."""
        return bool(self._coming)

    def newest(self, wait: bool, timeout: timedelta | None = None) -> Floats | None:
        """The last row that came since this was last asked; where we ``wait``, the last one expected."""
        row = None
        with self._naming():
            # A row's end is not a number until it is here. (gloo's works are completed only by waiting for them.)
            while self._coming and (wait or not self._coming[0][0][-1].isnan()):
                row, work = self._coming.popleft()
                if timeout is None:
                    self._world.listen(work, TELLING, self._rank, mutual=True)
                else:
                    work.wait(timeout)
        if not self._coming:
            self.flush(timeout)  # all that was told before: it would not have sent this row else
        return None if row is None else np.asarray(row.numpy())

    def tell(self, data: bytes) -> None:
        pieces = [torch.tensor([len(data)])]
        if data:
            pieces.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        with self._naming():
            for piece in pieces:
                work = dist.isend(piece, self._rank, group=self._world.control, tag=self._world.tags[1])
                self._sent.append(work)

    def flush(self, timeout: timedelta | None = None) -> None:
        """Wait until it has heard what it was told."""
        with self._naming():
            for work in self._sent:
                work.wait(timeout or self._world.timeout)
        self._sent.clear()

    def _naming(self) -> Any:
        return self._world.naming_the_culprit(f"{TELLING} with rank {self._rank}")
