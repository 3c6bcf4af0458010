"""The asynchronous server: answers every worker on its own, one update after the other under one lock.

An answer's parameters are copied under that lock, so that they are of one version; sending and receiving happen outside
of it, in one thread per worker. Workers wait for each other at the end of an epoch, in what they do together between
epochs, and under the ``bounded`` rule; nowhere else.
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
from omnilearn.control import judge_staleness, lr_factor
from omnilearn.control.rules import Verdict
from omnilearn.errors import InfeasibleError, OmniLearnError, UsageError
from omnilearn.pytorch import checkpoint
from omnilearn.pytorch.asynchronous import wire
from omnilearn.pytorch.asynchronous.epochs import Epochs
from omnilearn.pytorch.asynchronous.journal import Journal
from omnilearn.pytorch.asynchronous.layout import all_finite
from omnilearn.pytorch.asynchronous.meetings import Meetings
from omnilearn.pytorch.asynchronous.members import Member
from omnilearn.pytorch.asynchronous.owner import Owner, is_scheduler
from omnilearn.pytorch.asynchronous.planning import Planning
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


class Server:
    """All methods that answer a request take the lock for themselves; those named as helpers are called with it."""

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
        self._began = time.monotonic()
        self._meetings = Meetings()
        self._said: dict[int, dict[int, Any]] = {}
        self.on_progress: Callable[[int], None] = lambda step: None

    # Members

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

    def _copies(self) -> list[torch.Tensor]:
        return [part.clone() for part in (self.owner.values, self.owner.buffers, self.owner.frozen) if len(part)]

    def _all_of_it(self, m: Member, note: Any, copies: list[torch.Tensor] | None = None) -> Answer:
        header, parts = self._reply(m, note=note)
        header["parts"] |= wire.VALUES | wire.BUFFERS | wire.FROZEN
        values, *rest = copies or self._copies()
        return header, [*m.give(values), *rest, *parts]

    @property
    def _under_way(self) -> bool:
        return any(m.begun for m in self.members.values())

    def _present(self) -> dict[int, Resources]:
        return {m.rank: m.resources for m in self.members.values() if not m.lost}

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

    def _replan(self) -> None:
        """Plan for those who are here, where that can be done; else as before."""
        try:
            self.planning.roster(self._present())
        except InfeasibleError as error:
            log.warning("the plan is kept, as none can be made for the %d workers left: %s", len(self.members), error)
        self._note_plan()

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

    @property
    def main(self) -> int:
        """The lowest rank; the next one takes over only where it died."""
        return min(self._gone.union(self.members), default=0)

    # A worker's thread

    def serve(self, member: Member) -> None:
        clean = False
        try:
            while not clean:
                header = member.pair.receive_header(tuple(wire.NAMES), self.settings.timeout)
                note = self._receive(member, header)
                member.busy = True
                if member.lost:
                    self._welcome_back(member)
                answer, parts = self._answer(member, header, note)
                member.pair.send(answer, parts)
                clean = header["kind"] == wire.BYE
                member.busy, member.heard = False, time.monotonic()
        except wire.Disconnected as error:
            log.warning("rank %d (%s) is gone: %s", member.rank, member.where, error)
        except wire.Nonsense as error:
            log.warning("rank %d (%s) sent nonsense, and is disconnected: %s", member.rank, member.where, error)
        finally:
            self.leave(member, clean)
            member.pair.close()

    def _receive(self, member: Member, header: Header) -> Any:
        """The parts of a request, checked before they are received."""
        kind, parts = header["kind"], header["parts"]
        wanted = {wire.PUSH: wire.VALUES | wire.FLAGS | wire.BUFFERS, wire.END: wire.BUFFERS, wire.LEAVE: wire.BUFFERS}
        if parts & ~wire.NOTE != wanted.get(kind, 0):
            raise wire.Nonsense(f"parts {parts} with a {wire.NAMES[kind]}")
        if kind == wire.PUSH and not member.shared:
            member.pair.receive([member.inbox])
        elif kind in wanted and len(member.theirs) and not member.shared:
            member.pair.receive([member.theirs])
        if kind in wanted and len(member.theirs):
            member.buffers = member.theirs.clone()
        return member.pair.receive_note(header)

    def _welcome_back(self, member: Member) -> None:
        with self.lock:
            member.lost = False
            member.steps = max(member.steps, self._slowest(member))
            self._replan()
            log.warning("rank %d (%s) is back", member.rank, member.where)

    def _answer(self, member: Member, header: Header, note: Any) -> Answer:
        act = {
            wire.PUSH: self._push, wire.PULL: self._pull, wire.BEGIN: self._begin, wire.END: self._end,
            wire.LEAVE: self._leave, wire.MEET: self._meet, wire.SAY: self._say, wire.SAVE: self._save,
            wire.LOAD: self._load, wire.BYE: self._bye,
        }[header["kind"]]  # fmt: skip
        try:
            if header["rates"] or header.scheduled[:, :2].any():
                with self.lock:
                    self.owner.set_learning_rates(header.learning_rates)
                    self.owner.schedule(member.epoch, header.scheduled)
            return act(member, header, note)
        except wire.Nonsense:
            raise
        except Exception as error:  # theirs to handle; the server goes on for the others
            if not isinstance(error, OmniLearnError):
                log.exception("rank %d's %s failed", member.rank, wire.NAMES[header["kind"]])
            ours = isinstance(error, OmniLearnError)
            text = str(error) if ours else f"the server failed with {type(error).__name__}: {error}"
            with self.lock:
                return self._reply(member, wire.FAILED, note={"error": text})

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
        header["epoch"], header["over"] = m.epoch, self.epochs.is_over(m)
        header["batch"] = self.planning.batch(m.rank)
        header.ranges = [(lease.start, lease.stop) for lease in self.epochs.grant(m, header["batch"], grant)]
        header.learning_rates = self.owner.learning_rates
        parts: list[torch.Tensor] = []
        if values:
            header["parts"] = wire.VALUES
            parts += m.give(self.owner.values)
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

    # Gradients

    def _push(self, m: Member, header: Header, note: Any) -> Answer:
        finite, held = all_finite(m.numbers), 0.0
        with self.lock:
            m.pace = header["seconds"] or m.pace
            status = self._use(m, header, finite)
            if self.settings.staleness == "bounded" and status == wire.OK:
                since = time.monotonic()
                while self._judge(m, 0).wait and not self.epochs.is_over(m):
                    self._wait("the slowest worker", since)
                held = time.monotonic() - since
            return self._reply(m, status, grant=1, values=True, held=held)

    def _use(self, m: Member, header: Header, finite: bool) -> int:
        """Apply a gradient, or say why not."""
        count, samples = header["leases"], header["samples"]
        if header["generation"] != m.generation:
            log.warning("a late gradient of rank %d (%s) is dropped: others have its samples", m.rank, m.where)
            return wire.LATE
        if not 0 < count <= len(m.held) or sum(m.held[i].size for i in range(count)) != samples:
            raise wire.Nonsense(f"a gradient of {samples} samples in {count} leases, where it holds {list(m.held)}")
        staleness = self.owner.version - header["version"]
        if staleness < 0:
            raise wire.Nonsense(f"a gradient for version {header['version']}, the server is at {self.owner.version}")
        status, weight = wire.OK, 0.0
        if not finite:
            status = wire.NOT_FINITE
            log.warning("a gradient of rank %d (%s) is not finite, and is refused", m.rank, m.where)
        else:
            weight = self._judge(m, staleness).weight
            if weight:
                factor = lr_factor(self.settings.lr_scaling, samples / count, self.planning.mean_share)
                if factor != 1:
                    # For SGD the same as scaling the learning rate. Momentum and Adam would take the noise of a small
                    # batch into their averages in full; so, every sample counts the same there too.
                    for values in m.numbers:
                        values.mul_(factor)
                self.owner.apply(m.gradients, m.flags.tolist(), weight)
            else:
                status = wire.DISCARDED
        self.journal.update(m.rank, staleness, weight, samples)
        self._finish(m, count)
        m.steps += 1
        self.planning.record(m.rank, header["batch"], header["seconds"])
        self._note_plan()
        self._write_updates()
        self.lock.notify_all()
        return status

    def _judge(self, m: Member, staleness: int) -> Verdict:
        threshold = self.settings.threshold
        if threshold is None:
            threshold = 2 * max(len(self.members), 1)
        return judge_staleness(self.settings.staleness, staleness, max(m.steps - self._slowest(m), 0), threshold)

    def _slowest(self, m: Member) -> int:
        """Steps of the worker that has made fewest, among those that compute."""
        steps = [o.steps for o in self.members.values() if o is not m and o.computes]
        return min(steps, default=m.steps)

    def _finish(self, m: Member, count: int) -> None:
        self.epochs.finish(m, count)
        self.on_progress(self.epochs.step)
        self._check_epoch()

    def _pull(self, m: Member, header: Header, note: Any) -> Answer:
        with self.lock:
            return self._reply(m, grant=1, values=header["version"] != self.owner.version)

    # Epochs

    def _begin(self, m: Member, header: Header, note: Any) -> Answer:
        """The next epoch of this worker; who comes first opens it."""
        data = {key: int(note[key]) for key in ("size", "usable", "shuffle", "seed")}
        with self.lock:
            self._await_start()
            epochs, wanted, since = self.epochs, m.epoch + 1, time.monotonic()
            while wanted > epochs.epoch and not epochs.over:
                m.left = True
                self._check_epoch()
                self._wait("the others to end the epoch", since)
            if wanted > epochs.epoch:
                self._open(wanted, data)
            elif wanted == epochs.epoch and data != epochs.data:
                raise UsageError(f"this worker's data are {data}, the others' {epochs.data}: use the same everywhere")
            m.epoch, m.meetings, m.left, m.begun, m.late = wanted, 0, False, True, False
            self._said.clear()
            return self._reply(m, grant=min(int(note["depth"]), wire.MOST_LEASES), values=True)

    def _await_start(self) -> None:
        """Those who were started together begin together, unless one does not come."""
        deadline = self._began + START
        while self.joined + self.refused < self.settings.expected and time.monotonic() < deadline:
            self.lock.wait(0.1)

    def _open(self, epoch: int, data: dict[str, int]) -> None:
        self.epochs.open(epoch, data)
        steps = -(-data["usable"] // self.settings.global_batch)
        self.journal.epoch(self.members, epoch, self.epochs.step, steps, self.planning.by_rank)
        self._check_epoch()

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

    def _end(self, m: Member, header: Header, note: Any) -> Answer:
        """This worker has nothing left to do: it gets what others gave back, or the epoch's end."""
        with self.lock:
            since = time.monotonic()
            if header["generation"] == m.generation:
                self._finish(m, len(m.held))  # batches that the loop made no step for
            while not self.epochs.is_over(m):
                if self.epochs.free:
                    return self._reply(m, grant=1, values=True)
                self._wait("the last gradients of the epoch", since)
            return self._ending(m)

    def _leave(self, m: Member, header: Header, note: Any) -> Answer:
        with self.lock:
            since = time.monotonic()
            m.left = True
            self.epochs.take_back(m)
            self._check_epoch()
            self.lock.notify_all()
            while not self.epochs.is_over(m):
                self._wait("the others to end the epoch", since)
            return self._ending(m)

    def _ending(self, m: Member) -> Answer:
        """The same parameters and buffers for everybody, whatever the others do by now."""
        m.buffers = None
        header, parts = self._reply(m)
        header["parts"] |= wire.VALUES | wire.BUFFERS
        values, buffers = self.final
        return header, [*m.give(values), *([buffers] if len(buffers) else []), *parts]

    def _wait(self, what: str, since: float) -> None:
        self.lock.wait(0.5)
        if time.monotonic() - since > self.settings.timeout.total_seconds():
            raise UsageError(f"waited {self.settings.timeout.total_seconds():g} s for {what}")

    # Together, between epochs

    def _together(self, m: Member, brought: Any, act: Callable[[dict[int, Any]], Any]) -> Any:
        """What ``act`` makes of what everybody brings, the same for all. Called with the lock held."""
        if not self._under_way:
            self._await_start()
        if m.late:
            return act({m.rank: brought})  # it has just come, the others are in the middle of it
        since = time.monotonic()
        self.lock.notify_all()
        try:
            return self._meetings.attend(
                m, brought, act, self.members.values, lambda whom: self._wait(whom, since)
            )  # fmt: skip
        finally:
            self.lock.notify_all()

    def _meet(self, m: Member, header: Header, note: Any) -> Answer:
        """Everybody's values, by rank, and how fast each of them is."""

        def table(brought: dict[int, Any]) -> Any:
            ranks = sorted(brought)
            return {"ranks": ranks, "values": [brought[rank] for rank in ranks], "speeds": self.planning.rates(ranks)}

        with self.lock:
            return self._reply(m, note={"met": self._together(m, note, table)})

    def _say(self, m: Member, header: Header, note: Any) -> Answer:
        """Inside the loop nobody waits: what each worker last said under this number."""
        with self.lock:
            said = self._said.setdefault(int(note["number"]), {})
            said[m.rank] = note["value"]
            return self._reply(m, note={"said": [value for rank, value in said.items() if rank in self.members]})

    def _save(self, m: Member, header: Header, note: Any) -> Answer:
        with self.lock:
            if note["together"]:
                self._together(m, note, self._write)
                return self._reply(m)
            state = self._checkpoint({m.rank: note})
        checkpoint.write(note["folder"], state)
        with self.lock:
            return self._reply(m)

    def _write(self, brought: dict[int, Any]) -> None:
        folder = brought[min(brought)]["folder"]
        try:
            checkpoint.write(folder, self._checkpoint(brought))
        except Exception as error:
            raise UsageError(f"the server cannot write a checkpoint to {folder}: {error}") from error

    def _checkpoint(self, brought: dict[int, Any]) -> dict[str, Any]:
        """The same as the synchronous engine saves."""
        self._average_buffers()
        state, main = self.owner.pack(), brought[min(brought)]
        for i, own in main["local"].items():
            state["others"][i] = own
        return {
            **state,
            "sampler": self.epochs.state_dict(),
            "policy": self.planning.saved(),
            "random": {rank: theirs["random"] for rank, theirs in brought.items()},
            "global_batch": self.settings.global_batch,
            "extra": main["extra"],
        }

    def _load(self, m: Member, header: Header, note: Any) -> Answer:
        with self.lock:
            loaded = self._together(m, note, self._read)
            local = {i: loaded["others"][i] for i, o in enumerate(self.owner.others) if not is_scheduler(o)}
            content = {"extra": loaded["extra"], "random": loaded["random"].get(m.rank), "local": local,
                       "next": self.epochs.next}  # fmt: skip
            return self._all_of_it(m, content, loaded["as_read"])

    def _read(self, brought: dict[int, Any]) -> dict[str, Any]:
        folder = brought[min(brought)]["folder"]
        state = checkpoint.read(folder)
        if self._under_way:  # who comes late gets what was saved beside the model, and the model as it is now
            return {**state, "as_read": None}
        try:
            self.owner.unpack(state)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(f"the checkpoint in {folder} does not fit this model and optimizer: {error}") from error
        self.planning.restore(state["policy"])
        self._note_plan()
        if state["sampler"]:
            self.epochs.load_state_dict(state["sampler"])
        for member in self.members.values():
            member.epoch = self.epochs.next - 1
        return {**state, "as_read": self._copies()}  # the first to have it may soon change the parameters

    def _bye(self, m: Member, header: Header, note: Any) -> Answer:
        with self.lock:
            return self._reply(m)

    # Events

    def _note_plan(self) -> None:
        """Between epochs nobody follows a plan: that workers leave then, one by one, is no news."""
        if not self.epochs.over and self.members:
            self.journal.plan(self.planning.by_rank, self.epochs.step)

    def _write_updates(self, now: bool = False) -> None:
        self.journal.write_updates(self.owner.version, self.epochs.step, now=now)

    def finish(self) -> None:
        with self.lock:
            self._write_updates(now=True)
