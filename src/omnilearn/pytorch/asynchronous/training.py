"""What the server does with gradients and epochs: one update after the other, each sample of an epoch once."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from omnilearn.control import judge_staleness, lr_factor
from omnilearn.control.rules import Verdict
from omnilearn.data import compare
from omnilearn.errors import UsageError
from omnilearn.pytorch.asynchronous import wire
from omnilearn.pytorch.asynchronous.layout import all_finite
from omnilearn.pytorch.asynchronous.members import Member
from omnilearn.pytorch.asynchronous.room import Answer, Room
from omnilearn.pytorch.asynchronous.wire import Header

log = logging.getLogger("omnilearn")


class Training(Room):
    """Methods that answer a request (a member, a header, a note) take the lock; the others are called with it held."""

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
                steps = lr_factor(self.settings.lr_scaling, samples / count, self.planning.mean_share)
                self.owner.apply(m.gradients, m.flags.tolist(), weight, steps)
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

    def _finish(self, m: Member, count: int) -> None:
        self.epochs.finish(m, count)
        self.on_progress(self.epochs.step)
        self._check_epoch()

    def _pull(self, m: Member, header: Header, note: Any) -> Answer:
        with self.lock:
            return self._reply(m, grant=1, values=header["version"] != self.owner.version)

    def _say(self, m: Member, header: Header, note: Any) -> Answer:
        """Inside the loop nobody waits: what each worker last said under this number."""
        with self.lock:
            said = self._said.setdefault(int(note["number"]), {})
            said[m.rank] = note["value"]
            return self._reply(m, note={"said": [value for rank, value in said.items() if rank in self.members]})

    # Epochs

    def _begin(self, m: Member, header: Header, note: Any) -> Answer:
        """The next epoch of this worker; who comes first opens it."""
        data = {key: int(note[key]) for key in ("size", "usable", "shuffle", "seed")}
        samples = [(int(index), str(digest)) for index, digest in note["samples"]]
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
            self._compare(m, samples)
            m.epoch, m.meetings, m.left, m.begun, m.late = wanted, 0, False, True, False
            self._said.clear()
            return self._reply(m, grant=min(int(note["depth"]), wire.MOST_LEASES), values=True)

    def _compare(self, m: Member, samples: compare.Fingerprints) -> None:
        """All workers have the same data."""
        if not self._samples:
            self._samples, self._samples_of = samples, m
        index = compare.first_difference(self._samples, samples)
        if index is not None:
            first = self._samples_of
            assert first is not None
            raise UsageError(compare.difference(
                index, f"rank {first.rank} ({first.resources.host}) and rank {m.rank} ({m.resources.host})"
            ))  # fmt: skip

    def _open(self, epoch: int, data: dict[str, int]) -> None:
        self.epochs.open(epoch, data)
        steps = -(-data["usable"] // self.settings.global_batch)
        workers = [asdict(m.resources) for _, m in sorted(self.members.items())]
        self.journal.epoch(workers, epoch, self.epochs.step, steps, self.planning.by_rank)
        self._check_epoch()

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
        return header, [*self._give(m, values), *([buffers] if len(buffers) else []), *parts]
