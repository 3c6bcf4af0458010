"""How far training is: the epoch that is open, who holds which samples of it, and how a position is saved."""

from __future__ import annotations

from typing import Any

from omnilearn.data.leases import Lease, Leases
from omnilearn.errors import UsageError
from omnilearn.pytorch.asynchronous.members import Member


class Epochs:
    """One epoch at a time. ``over``: it has ended, and nobody has begun the next."""

    def __init__(self, global_batch: int, minimum: int) -> None:
        self._global_batch, self._minimum = global_batch, minimum
        self.epoch, self.over = -1, True
        self.data: dict[str, int] = {}
        self._leases: Leases | None = None
        self._restored: list[tuple[int, int]] = []
        self._saved: dict[str, int] = {}  # what the data must be for the restored ranges
        self.consumed = 0  # samples, over all epochs

    @property
    def step(self) -> int:
        """Global batches' worth of samples used so far."""
        return self.consumed // self._global_batch

    @property
    def next(self) -> int:
        """The epoch that a newcomer takes part in."""
        return self.epoch + self.over

    def open(self, epoch: int, data: dict[str, int]) -> None:
        for key, value in self._saved.items():
            if value != data[key]:
                raise UsageError(
                    f"the position was saved with {key} {value}, the data have {key} {data[key]}: it would repeat "
                    f"some samples and miss others: restore with the same {key}, or start anew"
                )
        done, self._restored, self._saved = self._restored, [], {}
        self._leases = Leases(data["usable"], epoch, minimum=self._minimum, done=done)
        self.epoch, self.over, self.data = epoch, False, data

    def is_over(self, m: Member) -> bool:
        """Whether the epoch that this worker is in has ended."""
        return not m.begun or m.epoch < self.epoch or self.over

    @property
    def all_used(self) -> bool:
        return self._leases is not None and self._leases.over

    @property
    def free(self) -> bool:
        """Whether there is something to lend."""
        return self._leases is not None and self._leases.free > 0

    def grant(self, m: Member, batch: int, count: int) -> list[Lease]:
        granted: list[Lease] = []
        while self._leases is not None and not self.is_over(m) and not m.left and len(granted) < count:
            lease = self._leases.take(m.rank, batch)
            if lease is None:
                break
            granted.append(lease)
        m.held.extend(granted)
        return granted

    def finish(self, m: Member, count: int) -> None:
        """The worker's oldest leases are used."""
        for _ in range(count):
            lease = m.held.popleft()
            if self._leases is not None and self._leases.finish(m.rank, lease):
                self.consumed += lease.size

    def take_back(self, m: Member) -> int:
        """What the worker holds is lent to others; how many samples that are. What it sends for them is late."""
        m.held.clear()
        m.generation += 1
        return self._leases.give_back(m.rank) if self._leases is not None else 0

    # Saving

    def state_dict(self) -> dict[str, Any] | None:
        """As the synchronous sampler's. That one knows no gaps: what is used beyond the first goes into ``ahead``."""
        if not self.data or self._leases is None:
            return None
        offset, ahead = (self.data["size"], []) if self.over else self._leases.position
        return {
            "version": 1, "size": self.data["size"], "seed": self.data["seed"], "shuffle": bool(self.data["shuffle"]),
            "epoch": self.epoch, "offset": offset, "step": self.step, "ahead": ahead,
        }  # fmt: skip

    def load_state_dict(self, position: dict[str, Any]) -> None:
        """Go on at a saved position with the next epoch that is begun."""
        size, offset = position["size"], position["offset"]
        self.epoch, self.over, self._leases, self.data = position["epoch"], True, None, {}
        self.consumed = position["step"] * self._global_batch
        if offset < size:
            self.epoch -= 1  # it is opened again, with the finished part left out
            self._restored = [(0, offset), *((start, stop) for start, stop in position.get("ahead", []))]
            self._saved = {key: int(position[key]) for key in ("size", "seed", "shuffle")}
