"""The asynchronous server: answers every worker on its own, one update after the other under one lock.

Sending and receiving happen outside of that lock, in one thread per worker. Workers wait for each other at the end of
an epoch, in what they do together between epochs, and under the ``bounded`` rule; nowhere else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from omnilearn.engine.journal import Journal
from omnilearn.engine.planning import Planning
from omnilearn.errors import OmniLearnError, UsageError
from omnilearn.pytorch import checkpoint
from omnilearn.pytorch.asynchronous import wire
from omnilearn.pytorch.asynchronous.meetings import Meetings
from omnilearn.pytorch.asynchronous.members import Member
from omnilearn.pytorch.asynchronous.owner import Owner, is_scheduler
from omnilearn.pytorch.asynchronous.room import Answer, Settings
from omnilearn.pytorch.asynchronous.training import Training
from omnilearn.pytorch.asynchronous.wire import Header

log = logging.getLogger("omnilearn")


class Server(Training):
    """Methods that answer a request (a member, a header, a note) take the lock; the others are called with it held."""

    def __init__(self, owner: Owner, planning: Planning, settings: Settings, journal: Journal) -> None:
        super().__init__(owner, planning, settings, journal)
        self._meetings = Meetings()
        self._said_folder: str | None = None  # where checkpoints are

    # A worker's thread

    def serve(self, member: Member) -> None:
        clean = False
        torch.set_num_threads(self.settings.threads)
        try:
            member.pair.expect(member.buckets)
            while not clean:
                header = member.pair.receive_header(tuple(wire.NAMES), self.settings.timeout)
                note = self._receive(member, header)
                member.busy = True
                if member.lost:
                    self.welcome_back(member)
                answer, parts = self._answer(member, header, note)
                if header["kind"] == wire.PUSH:
                    member.pair.expect(member.buckets)  # the next gradient may come from now on
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
            member.pair.receive_expected()
            size = self.owner.portrait.values.size
            gradient, beside = member.inbox.split([size, len(member.inbox) - size])
            member.pair.receive([gradient, beside] if header["again"] else [beside])
        elif kind in wanted and len(member.theirs) and not member.shared:
            member.pair.receive([member.theirs])
        if kind in wanted and len(member.theirs):
            member.buffers = member.theirs.clone()
        return member.pair.receive_note(header)

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

    def _save(self, m: Member, header: Header, note: Any) -> Answer:
        with self.lock:
            if note["together"]:
                self._together(m, note, self._write)
                return self._reply(m)
            folder, state = self._folder({m.rank: note}), self._checkpoint({m.rank: note})
        checkpoint.write(folder, state)
        with self.lock:
            return self._reply(m)

    def _folder(self, brought: dict[int, Any]) -> str:
        """Where rank 0 says, or last said: a worker that joined names no place on the server's host."""
        if 0 in brought:
            self._said_folder = str(brought[0]["folder"])
        if self._said_folder is None:
            raise UsageError("rank 0 has not said yet where checkpoints go: it must call save() or load() first")
        return self._said_folder

    def _write(self, brought: dict[int, Any]) -> None:
        folder = self._folder(brought)
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
        folder = self._folder(brought)
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
