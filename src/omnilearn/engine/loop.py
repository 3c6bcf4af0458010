"""The training loop as all ranks walk through it: who takes part in each step, and how it ends.

Every rank takes the same steps. A parked one has empty shares: it runs ahead until the next exchange of timings and
waits there for the others. What is computed, and how state travels to a worker that comes back, is the framework's.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from omnilearn.data import Share
from omnilearn.engine.peers import Peers
from omnilearn.engine.planner import Planner, Stop
from omnilearn.engine.progress import Progress
from omnilearn.engine.source import Source
from omnilearn.errors import UsageError
from omnilearn.observe import EventLog

Workers = tuple[int, ...]
_looping: list[weakref.ref[SyncLoop]] = []
"""Of this process: the one whose training loop was begun last and is not over."""


class SyncLoop(ABC):
    """Base of synchronous engines. ``active`` are the workers of the step under way, () before the first."""

    def __init__(self, world: Peers, planner: Planner, events: EventLog) -> None:
        self.world, self.planner, self.events = world, planner, events
        self.rank = world.rank
        self.everybody: Workers = tuple(range(world.size))
        self.active: Workers = ()
        self.parked: Workers = ()  # those who wait until they are called back
        self.source: Source | None = None  # of the training loop under way
        self.share: Share | None = None  # in the user's hands
        self.done = False  # the step of that share is complete
        self.last_source: Source | None = None  # of the loop under way, or the one before
        self.step = 0  # steps done before the loop under way, over all sources
        self.loops = 0  # begun so far
        self.asked_main = False  # the script asked inside a loop whether this is rank 0
        self._left: Source | None = None  # a loop the user broke out of, which the parked do not know yet
        self._progress = Progress()
        self.loss: Any = None  # of the step, for the events
        self._asked = self._data = 0.0  # when samples were last asked for; seconds this step waited for them

    # What a framework adds

    @abstractmethod
    def form(self, workers: Workers) -> None:
        """Get ready to reduce over these workers. Called by all ranks, members or not."""

    @abstractmethod
    def hand_over(self, source: int, targets: Sequence[int]) -> None:
        """Send the training state from ``source`` to ``targets``. Called by all ranks."""

    @abstractmethod
    def share_buffers(self) -> None:
        """Average what each worker keeps for itself (BatchNorm's statistics) over those who take part."""

    @abstractmethod
    def restart_clock(self) -> None:
        """What came before does not count as this worker's busy time."""

    def check_late(self) -> None:  # noqa: B027 (most have nothing to say)
        """Raise what is known of the last steps only now, at the end of a loop. All ranks that took part do."""

    # Who takes part

    @property
    def takes_part(self) -> bool:
        return self.rank in self.active

    @property
    def participants(self) -> Workers:
        """Who runs the user's code now: those who take part in the step under way, outside of the loop everybody."""
        return self.active if self.source is not None else self.everybody

    # What a source of batches calls

    def begin_epoch(self, source: Source) -> None:
        if self.source is not None:
            raise UsageError(
                "one training loop at a time: finish or break the loop under way first; two loaders in one loop "
                "(zip) cannot be cut alike: make one data set of them"
            )
        self.settle("a training loop")
        _looping[:] = [weakref.ref(self)]
        self.source = self.last_source = source
        self.loops += 1
        self.restart_clock()
        self.planner.resume()
        sampler = source.sampler
        if sampler.step != self.step:  # another source was in use meanwhile
            sampler.load_state_dict(sampler.state_dict() | {"step": self.step})
        sampler.schedule(self.planner.plan.batches, sampler.step)
        if self.world.is_main and self.events:
            self.events.write("epoch", epoch=sampler.epoch, step=sampler.step, steps=source.steps)

    def begin_step(self, source: Source) -> bool:
        """False: the others have left the loop."""
        if _looping and _looping[0]() is not self:  # not at its begin: the one before may have ended by an error
            raise UsageError(
                "a training loop of another OmniLearn object was begun within this one: one after the other works, two "
                "at once would wait for each other: finish or break the first before the second"
            )
        goes_on = self._goes_on(source, self.planner.tick(source.sampler, source.horizon, self.parked))
        self._asked = time.perf_counter()
        return goes_on

    def enter(self, source: Source, share: Share) -> bool:
        """Make the workers of ``share`` the active ones. False: the others have left the loop."""
        self._data = time.perf_counter() - self._asked
        active = share.active
        if active == self.active:
            return True
        if not self._all_here(source):
            return False
        before, self.active = self.active, active
        self.parked = tuple(rank for rank in self.everybody if rank not in active)
        joining = [rank for rank in active if rank not in before] if before else []
        if joining:
            self.hand_over(before[0], joining)
        self.form(active)
        self.restart_clock()
        return True

    def sit_out(self, source: Source, share: Share) -> None:
        self.planner.record(share.sizes, took_part=False)
        source.sampler.consumed(share)

    def begin_share(self, share: Share) -> None:
        """The user gets (the first piece of) this share."""
        self.share, self.done = share, False

    def end_share(self, source: Source, share: Share) -> None:
        """The user is through with it."""
        self.planner.record(share.sizes, True, self._data, self.loss)
        source.sampler.consumed(share)
        self._progress.write(share.step + 1)
        self.share = None

    def end_epoch(self, source: Source) -> bool:
        """False: the others have left the loop."""
        if not self._all_here(source):
            return False
        self.check_late()
        self._end_loop()
        self.share_with_parked()
        return True

    def leave(self, source: Source) -> None:
        """The loop was left early: by a break, on all workers that took part, or by an error, on this one alone.

        The two look the same from here, so nothing is said to the others yet.
        """
        if self.share is not None and self.done:
            self.planner.record(self.share.sizes, True, self._data, self.loss)
            source.sampler.consumed(self.share)
        self._end_loop()
        self._left = source

    def settle(self, what: str = "what all do together") -> None:
        """After a break, at the next thing all do together: tell the parked, and have all ranks alike again."""
        source, self._left = self._left, None
        if source is None:
            return
        self.agree_on_leaving(what, source)
        self.check_late()
        if self.parked:
            self.planner.leave(source.sampler, source.horizon, self.parked)
        self.share_with_parked()

    def agree_on_leaving(self, what: str, source: Source) -> None:  # noqa: B027
        """All who took part have left the loop at the same step, and now do the same, or an error says who did not."""

    def share_with_parked(self) -> None:
        """At the end of a loop all ranks have the same model, the parked too."""
        self.share_buffers()
        if self.parked:
            self.hand_over(self.active[0], self.parked)

    def _all_here(self, source: Source) -> bool:
        """Whether the loop goes on. The parked run ahead, and must not do alone what they do with the others."""
        if not self.parked:
            return True
        return self._goes_on(source, self.planner.confirm(source.sampler, source.horizon, self.parked))

    def _goes_on(self, source: Source, stop: Stop | None) -> bool:
        if stop is not None:
            position = source.sampler.state_dict() | {"step": stop.step, "offset": stop.offset}
            source.sampler.load_state_dict(position)
            self._end_loop()
            self.share_with_parked()
        return stop is None

    def _end_loop(self) -> None:
        if self.source is not None:
            self.step = self.source.sampler.step
            self.planner.pause()
        self.share = self.source = None
        self.forget_loop()

    def forget_loop(self) -> None:
        """Whatever becomes of it, this process may begin another one."""
        if _looping and _looping[0]() is self:
            _looping.clear()
