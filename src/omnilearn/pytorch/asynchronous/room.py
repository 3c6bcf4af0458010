"""Who is here: workers that come, go and fall silent, and the answers that all of them get.

Everything in it happens under one lock. An answer's parameters are copied under that lock, so that they are of one
version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from omnilearn.cluster.resources import Resources
from omnilearn.data import compare
from omnilearn.engine.journal import Journal
from omnilearn.engine.planning import Planning
from omnilearn.errors import InfeasibleError, OmniLearnError, UsageError
from omnilearn.pytorch.asynchronous import wire
from omnilearn.pytorch.asynchronous.epochs import Epochs
from omnilearn.pytorch.asynchronous.members import Member
from omnilearn.pytorch.asynchronous.owner import Owner
from omnilearn.pytorch.asynchronous.wire import Header

log = logging.getLogger("omnilearn")
Answer = tuple[Header, Sequence[torch.Tensor]]

PATIENCE = 5.0
"""A worker is given this many times its last step's time, where that is more than the lease timeout."""
START = 60.0
"""Seconds that the first epoch waits for the workers that were started together."""


@dataclass(frozen=True)
class Settings:
    global_batch: int
    minimum: int
    staleness: str
    threshold: int | None
    lr_scaling: str
    lease_timeout: float
    timeout: timedelta
    expected: int
    threads: int  # that an update is computed with


class Room:
    """Methods without an underscore take the lock for themselves; the others are called with it held."""

    def __init__(self, owner: Owner, planning: Planning, settings: Settings, journal: Journal) -> None:
        self.owner, self.planning, self.settings, self.journal = owner, planning, settings, journal
        self.lock = threading.Condition()
        self.left = threading.Event()  # somebody left: set for whoever waits for the end
        self.members: dict[int, Member] = {}
        self.joined = self.refused = 0
        self.unclean = False  # the last one who left did so without a word
        self._gone: set[int] = set()  # ranks that left with a word: their place as the main worker stays theirs
        self.epochs = Epochs(settings.global_batch, settings.minimum)
        self.final: tuple[torch.Tensor, torch.Tensor] = owner.values, owner.buffers
        self._outgoing: tuple[int, torch.Tensor] = (-1, owner.values)  # a version's parameters, for all it is sent to
        self._began = time.monotonic()
        self._said: dict[int, dict[int, Any]] = {}
        self._samples: compare.Fingerprints = []  # of the worker that came first
        self._samples_of: Member | None = None
        self.on_progress: Callable[[int], None] = lambda step: None

    def welcome(self, m: Member) -> Answer:
        """Let a new worker in: it is planned for from now on, and gets the whole model. Or say why not."""
        with self.lock:
            try:
                if m.rank in self.members:
                    raise UsageError(f"rank {m.rank} is here already")
                self.planning.roster({**self._present(), m.rank: m.resources})
            except OmniLearnError as error:
                return self._with_note(Header(wire.FAILED), [], {"error": str(error)})
            self.members[m.rank] = m
            m.steps = self._slowest(m)
            m.epoch, m.late = self.epochs.next - 1, self._under_way
            self.joined += 1
            self._note_plan()
            self.lock.notify_all()
            return self._all_of_it(m, {"next": self.epochs.next})

    def leave(self, member: Member, clean: bool = False) -> None:
        with self.lock:
            if self.members.get(member.rank) is not member:
                return
            del self.members[member.rank]
            self.unclean = not clean
            if clean:
                self._gone.add(member.rank)
            self.epochs.take_back(member)
            self._replan()
            self._check_epoch()
            self.lock.notify_all()
            self.left.set()

    def _present(self) -> dict[int, Resources]:
        return {m.rank: m.resources for m in self.members.values() if not m.lost}

    @property
    def _under_way(self) -> bool:
        return any(m.begun for m in self.members.values())

    @property
    def main(self) -> int:
        """The lowest rank; the next one takes over only where it died."""
        return min(self._gone.union(self.members), default=0)

    def check_silence(self) -> None:
        """Leases of workers not heard of for too long are given out again."""
        with self.lock:
            for m in self.members.values():
                limit = max(self.settings.lease_timeout, PATIENCE * m.pace)
                if m.held and not m.busy and not m.lost and time.monotonic() - m.heard > limit:
                    m.lost = True
                    samples = self.epochs.take_back(m)
                    log.warning(
                        "nothing was heard of rank %d (%s) for %.0f s: its %d samples are given out again",
                        m.rank, m.where, limit, samples,
                    )  # fmt: skip
                    self._replan()
                    self._check_epoch()
                    self.lock.notify_all()
            self._write_updates()

    def welcome_back(self, member: Member) -> None:
        with self.lock:
            member.lost = False
            member.steps = max(member.steps, self._slowest(member))
            self._replan()
            log.warning("rank %d (%s) is back", member.rank, member.where)

    def _replan(self) -> None:
        """Plan for those who are here, where that can be done; else as before."""
        try:
            self.planning.roster(self._present())
        except InfeasibleError as error:
            log.warning("the plan is kept, as none can be made for the %d workers left: %s", len(self.members), error)
        self._note_plan()

    def finish(self) -> None:
        with self.lock:
            self._write_updates(now=True)

    # Epochs, as far as they depend on who is here

    def _check_epoch(self) -> None:
        """End the epoch where all of it is used, or where everybody has left it."""
        if self.epochs.over:
            return
        # Who has not begun it yet will come to it: those who left wait, or that one's loop would be empty.
        inside = [m for m in self.members.values() if not m.late and not m.lost]
        if self.epochs.all_used or (inside and all(m.left and m.epoch == self.epochs.epoch for m in inside)):
            self.epochs.over = True
            self._average_buffers()
            self.final = self.owner.values.clone(), self.owner.buffers.clone()
            self._write_updates(now=True)
            self.lock.notify_all()

    def _average_buffers(self) -> None:
        self.owner.average_buffers([m.buffers for m in self.members.values() if m.buffers is not None])

    def _slowest(self, m: Member) -> int:
        """Steps of the worker that has made fewest, among those that compute."""
        steps = [o.steps for o in self.members.values() if o is not m and o.computes]
        return min(steps, default=m.steps)

    def _await_start(self) -> None:
        """Those who were started together begin together, unless one does not come."""
        deadline = self._began + START
        while self.joined + self.refused < self.settings.expected and time.monotonic() < deadline:
            self.lock.wait(0.1)

    def _wait(self, what: str, since: float) -> None:
        self.lock.wait(0.5)
        if time.monotonic() - since > self.settings.timeout.total_seconds():
            raise UsageError(f"waited {self.settings.timeout.total_seconds():g} s for {what}")

    # Answers

    def _reply(
        self,
        m: Member,
        kind: int = wire.OK,
        *,
        grant: int = 0,
        values: bool = False,
        held: float = 0.0,
        note: Any = None,
    ) -> tuple[Header, list[torch.Tensor]]:
        """An answer, with leases, the current parameters and the plan where it is new. The lock is held."""
        header = Header(kind, version=self.owner.version, generation=m.generation, held=held)
        header["workers"], header["main"] = len(self.members), self.main
        header["epoch"], header["over"], header["step"] = m.epoch, self.epochs.is_over(m), self.epochs.step
        header["batch"] = self.planning.batch(m.rank)
        header.ranges = [(lease.start, lease.stop) for lease in self.epochs.grant(m, header["batch"], grant)]
        header.learning_rates = self.owner.learning_rates
        parts: list[torch.Tensor] = []
        if values:
            header["parts"] = wire.VALUES
            parts += self._give(m)
        if m.told != self.planning.changes and kind != wire.FAILED:
            m.told, plan = self.planning.changes, self.planning.by_rank
            note = {**(note or {}), "plan": [list(plan.batches), plan.reason, plan.predicted, plan.instead_of]}
        return self._with_note(header, parts, note)

    @staticmethod
    def _with_note(header: Header, parts: list[torch.Tensor], note: Any) -> tuple[Header, list[torch.Tensor]]:
        if note is not None:
            parts.append(wire.encode(note))
            header["note"], header["parts"] = len(parts[-1]), header["parts"] | wire.NOTE
        return header, parts

    def _give(self, m: Member, values: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Have a copy of these parameters, by default the current ones, in the answer: what is to be sent of it."""
        if m.outbox is not None:
            m.outbox.copy_(self.owner.values if values is None else values)
            return []
        if values is not None:
            return [values]  # nobody changes these
        if self._outgoing[0] != self.owner.version:
            self._outgoing = self.owner.version, self.owner.values.clone()
        return [self._outgoing[1]]

    def _copies(self) -> list[torch.Tensor]:
        return [part.clone() for part in (self.owner.values, self.owner.buffers, self.owner.frozen) if len(part)]

    def _all_of_it(self, m: Member, note: Any, copies: list[torch.Tensor] | None = None) -> Answer:
        header, parts = self._reply(m, note=note)
        header["parts"] |= wire.VALUES | wire.BUFFERS | wire.FROZEN
        values, *rest = copies or self._copies()
        return header, [*self._give(m, values), *rest, *parts]

    def _note_plan(self) -> None:
        """Between epochs nobody follows a plan: that workers leave then, one by one, is no news."""
        if not self.epochs.over and self.members:
            self.journal.plan(self.planning.by_rank, self.epochs.step)

    def _write_updates(self, now: bool = False) -> None:
        self.journal.write_updates(self.owner.version, self.epochs.step, now=now)
