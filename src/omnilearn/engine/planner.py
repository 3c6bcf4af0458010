"""Carries timings to the policy and plans to the sampler, at the same steps on every rank.

Every few steps all ranks send what they measured to the fastest that takes part, the thinker. It runs the policy while
it waits for the others' gradients, or else at the start of the next step, where what was decided becomes known on all:
the slow are not made slower by thinking, and nobody waits for the parked. A new plan takes effect as many steps ahead
as the deepest prefetch of any rank, so that nothing already fetched is thrown away. Decides nothing itself; how the
ranks talk is the framework's.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple, Protocol

import numpy as np

from omnilearn import control
from omnilearn.control import Plan, Policy, Problem, Report, State
from omnilearn.control.curves import LEAP
from omnilearn.data import Sampler
from omnilearn.engine.peers import Exchange, Floats, Peers
from omnilearn.engine.pulse import Pulse
from omnilearn.engine.story import Story
from omnilearn.errors import OmniLearnError, UsageError
from omnilearn.observe import EventLog

log = logging.getLogger("omnilearn")

GROWING = 4
"""Steps with a batch LEAP times the largest before that say little on a CPU: the allocator learns what to keep."""
LEFT_AT, PULSE, MICRO, FAILED, RATE, LOSS, HEADER = slice(0, 2), 2, 3, 4, 5, 6, 7
"""What a rank tells of itself before its timings: where it left the loop (-1: it did not), its pulse, its largest
micro-batch (0: not known), with how many samples it ran out of memory since (0: it did not), its learning rates, added
up, and the mean loss of these steps (0: not known)."""
SUMS = 3
"""So many exchanges in a row whose losses are in the ratio of the batches are taken for losses that are sums."""
ALONE_EVERY = 0.5
"""Seconds between two entries in the events where there are no exchanges."""


@dataclass(frozen=True)
class Timing:
    """One step of one worker, in seconds: its own work, and waiting for the others."""

    busy: float
    wait: float


class Clock(Protocol):
    """Where this worker's timings come from, oldest first."""

    def take(self) -> Timing | None: ...
    def clear(self) -> None: ...


class Memory(Protocol):
    """What a worker knows of its memory, where its engine learns it."""

    failed: int

    @property
    def micro_batch(self) -> int | None: ...


@dataclass(frozen=True)
class Stop:
    """A peer left the loop early, at this position."""

    step: int
    offset: int


class _Answer(NamedTuple):
    """What follows from what everybody said: the same on all ranks."""

    stop: Stop | None
    pulse: tuple[float, ...]  # everybody's
    micro: tuple[int, ...]  # everybody's largest micro-batch (0: not known)
    failed: tuple[int, ...]  # the samples with which each ran out of memory (0: it did not)
    state: State
    rates: dict[int, float]  # the learning rates of those who take part, where they differ


@dataclass
class _Exchange:
    """An exchange under way: the steps it tells of, and how the others are heard."""

    begun: int
    sizes: list[tuple[int, ...]]
    parked: Collection[int]
    thinker: int
    talk: Exchange
    answer: _Answer | None = None  # once it was thought about

    @property
    def due(self) -> int:
        return self.begun + 1


class Sizes:
    """The batches that a worker has had. Its first step with another one says little: kernels are chosen or compiled
    for its shape, memory is allocated. It can take half as long again, which is not the batch's fault. On a CPU the
    first few with one that is much larger than all before (``growing``) are like that."""

    def __init__(self, growing: int = 1) -> None:
        self._growing = growing
        self._left: dict[int, int] = {}  # by batch, the steps with it that do not tell

    def tells(self, batch: int) -> bool:
        """Whether a step with this batch tells how fast the worker is; it has had it now."""
        if batch not in self._left:
            self._left[batch] = self._growing if batch >= LEAP * max(self._left, default=batch) else 1
        elif not self._left[batch]:
            return True
        self._left[batch] -= 1
        return False


class _Row(NamedTuple):
    """A step that was done: everybody's batches, and what the events say of this rank beside its timing."""

    sizes: tuple[int, ...]
    took_part: bool
    data: float
    loss: Any  # a number, or something that becomes one; None: not known


class Planner:
    """Owns the policy's state. ``tick`` is called by every rank at the start of every step."""

    def __init__(
        self,
        world: Peers,
        clock: Clock,
        policy: Policy,
        problem: Problem,
        notify: Callable[[Plan, int], None],
        events: EventLog | None = None,
        memory: Memory | None = None,
        rate: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._memory, self._rate = memory, rate
        self._world, self._clock, self.policy, self.problem = world, clock, policy, problem
        self._notify, self._events = notify, events or EventLog(None, world.rank)
        self.state: State = policy.start(problem)
        self._rows: list[_Row] = []
        self._sizes = Sizes(GROWING if world.resources[world.rank].device == "cpu" else 1)
        self._micro: tuple[int, ...] = ()  # everybody's largest micro-batch, as last heard
        self._last: _Answer | None = None  # answer that was heard or given…
        self._told = b""  # … by this rank, if by this one
        if world.size > 1:
            _try_to_send(self.state)
        self._reported = self._next = 0  # the step of the last exchange, and of the next
        self._logged = 0  # the step of the first row
        self._alone_since = time.monotonic()
        self._story = Story(self._events, world)
        self._story.plan(self.state, 0)
        self._exchange: _Exchange | None = None
        self._sums = 0
        self._pulse = Pulse(world.speed)
        # On CUDA the last step may still be running: its events are read with the next report.
        self._hold_back = int(any(r.device != "cpu" for r in world.resources))

    @property
    def plan(self) -> Plan:
        return self.state.plan

    def restore(self, state: State, step: int) -> None:
        """Go on from a restored state at ``step``. By all ranks: what they were telling each other is forgotten."""
        self._forget_exchange()
        self._pulse.forget()
        self._last = None
        self._reset(state, step)

    def _reset(self, state: State, step: int) -> None:
        self.state, self._reported, self._next = state, step, step + state.interval
        self._told = b""
        self._logged = step
        self._rows.clear()
        self._clock.clear()

    def record(self, sizes: tuple[int, ...], took_part: bool, data: float = 0.0, loss: Any = None) -> None:
        """A step is over. ``data``: seconds in which this rank waited for its samples. ``loss`` is read later."""
        if self._world.size > 1 or self._events:
            self._rows.append(_Row(sizes, took_part, data, loss))
        if self._world.size > 1:
            return
        if not self._events:
            self._clock.clear()
        elif time.monotonic() - self._alone_since > ALONE_EVERY:
            self._alone_since = time.monotonic()
            self._log_rest(keep=1)

    def tick(self, sampler: Sampler, horizon: int, parked: Collection[int]) -> Stop | None:
        """Finish and begin exchanges where they are due. A ``Stop`` says that the others have left the loop."""
        if self._world.size == 1:
            return None
        step = sampler.step
        if self._exchange is not None and step >= self._exchange.due:
            stop = self._finish(sampler, horizon)
            if stop is not None:
                return stop
        if self._exchange is None and step >= self._next:
            self._begin(step, parked)
        return None

    def think(self) -> None:
        """On the thinker, decide already now: this rank only waits for others' gradients.

        Others who are later now would be waited for at the next step. Nothing changes before the exchange is over: it
        is so at the same step on all ranks.
        """
        if self._exchange is not None and self._world.rank == self._exchange.thinker:
            self._hear(self._exchange)

    def confirm(self, sampler: Sampler, horizon: int, parked: Collection[int]) -> Stop | None:
        """An exchange here and now. Before anything the parked do together with the others: those may have left."""
        if self._exchange is None:
            self._begin(sampler.step, parked, look=False)
        return self._finish(sampler, horizon)

    def leave(self, sampler: Sampler, horizon: int, parked: Collection[int]) -> None:
        """The loop ended early: tell the parked, who wait for the next exchange."""
        if self._exchange is not None:
            self._finish(sampler, horizon)
        self._begin(self._next, parked, stop=Stop(sampler.step, sampler.offset))
        self._finish(sampler, horizon)

    def pause(self) -> None:
        """A loop is over: until the next one nobody is parked, and no look is due."""
        self._pulse.pause()

    def resume(self) -> None:
        """The next loop begins."""
        self._pulse.resume()

    def end_threads(self) -> None:
        self._pulse.end()

    def drain(self) -> None:
        """Wait for an exchange under way, and forget it."""
        self.end_threads()
        self._log_rest(keep=0)
        self._story.curves(self.state, self._logged, now=True)
        self._forget_exchange()

    def _forget_exchange(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            with contextlib.suppress(OmniLearnError, RuntimeError):
                self._hear(exchange)

    def _begin(self, step: int, parked: Collection[int], stop: Stop | None = None, look: bool = True) -> None:
        idle = self._world.rank in parked
        expected = self._next - self._reported  # also where it comes earlier: all must send the same length
        keep = self._hold_back if stop is None else 0
        rows = self._rows[: len(self._rows) - keep]
        self._rows = self._rows[len(rows) :]
        sent = np.zeros(HEADER + 2 * (expected + self._hold_back))
        if self._memory is not None:
            sent[MICRO], sent[FAILED] = self._memory.micro_batch or 0, self._memory.failed
            self._memory.failed = 0
        sent[RATE], sent[LOSS] = self._rate(), _mean_loss(rows)
        sent[LEFT_AT] = (-1, -1) if stop is None else (stop.step, stop.offset)
        sent[PULSE] = self._pulse.ratio if idle else self._pulse.forget()
        timings = [self._clock.take() if row.took_part else None for row in rows]
        for i, (row, timing) in enumerate(zip(rows[: (len(sent) - HEADER) // 2], timings, strict=False)):
            own = row.sizes[self._world.rank]  # none: in a small last step it computed what was lent to it
            tells = row.took_part and own and self._sizes.tells(own)
            if timing is not None and tells:
                sent[HEADER + 2 * i], sent[HEADER + 1 + 2 * i] = timing.busy, timing.wait
        self._log_steps(rows, timings)
        thinker = self.thinker(parked)
        talk = self._world.exchange(sent, thinker)
        self._exchange = _Exchange(step, [row.sizes for row in rows], parked, thinker, talk)
        self._reported = step
        if idle and look:  # nobody waits for what is found: it goes out with the next exchange
            self._pulse.look()

    def _finish(self, sampler: Sampler, horizon: int) -> Stop | None:
        """The exchange is over, on all ranks at the same step."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        answer = self._hear(exchange)
        self._hear_of_memory(answer)
        if answer.stop is not None:
            self._reset(self.state, answer.stop.step)
            return answer.stop
        if answer.rates:
            told = ", ".join(f"rank {rank}: {rate:g}" for rank, rate in answer.rates.items())
            raise UsageError(
                f"the learning rates differ between workers ({told}), and so their models will: a scheduler that "
                f"prepare() does not know stands still while its worker is parked (model, optimizer, scheduler = "
                f"omni.prepare(model, optimizer, scheduler)), and so does a counter of the script's own: set rates by "
                f"omni.global_step"
            )
        before, self.state = self.state.plan, answer.state
        plan = self.state.plan
        if plan.batches != before.batches:
            sampler.schedule(plan.batches, exchange.due + horizon)
            self._notify(plan, exchange.due + horizon)
        if plan.reason != before.reason or plan.batches != before.batches:
            self._story.plan(self.state, exchange.due + horizon)
        self._story.curves(self.state, exchange.due)
        self._next = exchange.begun + max(self.state.interval, 1)
        return None

    def thinker(self, parked: Collection[int]) -> int:
        """The fastest of those who take part: the same on all ranks."""
        speeds = np.array(self.problem.speeds)
        speeds[list(parked)] = 0.0
        return int(np.argmax(speeds))

    def _hear(self, exchange: _Exchange) -> _Answer:
        """The answer: from the thinker, or on it, by thinking."""
        if exchange.answer is None and self._world.rank == exchange.thinker:
            exchange.answer = self._last = self._decide(exchange)
            told = pickle.dumps(exchange.answer)
            exchange.talk.answer(b"" if told == self._told else told)
            self._told = told
        elif exchange.answer is None:
            if told := exchange.talk.heard():
                self._last, self._told = pickle.loads(told), b""
            exchange.answer = self._last  # said nothing: as before
        assert exchange.answer is not None
        return exchange.answer

    def _decide(self, exchange: _Exchange) -> _Answer:
        """What follows from what everybody said."""
        table, state = self._rows_of(exchange), self.state
        micro, failed = (tuple(table[:, column].astype(int).tolist()) for column in (MICRO, FAILED))
        left_at = table[table[:, 0].argmax(), LEFT_AT]
        stop = Stop(*left_at.astype(int).tolist()) if left_at[0] >= 0 else None
        if exchange.sizes and stop is None:  # something was measured, and nobody leaves
            rows = slice(HEADER, HEADER + 2 * len(exchange.sizes))
            busy, wait = table[:, rows][:, 0::2].T, table[:, rows][:, 1::2].T
            report = Report.of(np.asarray(exchange.sizes), busy, wait, measured=busy > 0, pulse=table[:, PULSE])
            state = self.policy.update(self._holding(micro), state, report)
        here = [rank for rank in range(self._world.size) if rank not in exchange.parked]
        rates = dict(zip(here, table[here, RATE].tolist(), strict=True))
        differ = stop is None and len(set(rates.values())) > 1
        if stop is None and exchange.sizes:
            self._look_at_losses(np.mean(exchange.sizes, axis=0)[here].tolist(), table[here, LOSS].tolist())
        return _Answer(stop, tuple(table[:, PULSE].tolist()), micro, failed, state, rates if differ else {})

    def _look_at_losses(self, batches: list[float], losses: list[float]) -> None:
        """Say so, once, where losses seem to be sums over the batch: workers with large ones would count for more."""
        sums = control.grows_with(batches, losses)
        self._sums = self._sums + 1 if sums else self._sums if sums is None else 0
        if self._sums == SUMS:
            log.warning(
                "the losses of the workers are in the ratio of their batches (%s for %s samples), as those that are "
                "sums over the batch: backward() takes the mean over it (reduction='mean'), or weight= what it is a "
                "mean over", ", ".join(f"{loss:.3g}" for loss in losses[:4]), ", ".join(f"{b:g}" for b in batches[:4]),
            )  # fmt: skip

    def _rows_of(self, exchange: _Exchange) -> Floats:
        """What everybody said. Those who were parked all the while may be late: nobody waits for them."""
        awaited = np.ones(self._world.size, dtype=bool)
        awaited[list(exchange.parked)] = False
        if exchange.sizes:
            awaited |= np.any(exchange.sizes, axis=0)
        table = exchange.talk.rows(np.flatnonzero(awaited).tolist())
        late, unheard = np.isnan(table[:, -1]), np.isnan(table[:, PULSE])
        pulse = np.where(unheard, 1.0 if self._last is None else self._last.pulse, table[:, PULSE])
        micro = np.where(unheard, self._micro or 0, table[:, MICRO])
        table[late], table[late, LEFT_AT] = 0.0, -1.0
        table[:, PULSE], table[:, MICRO] = pulse, micro
        return table

    def _holding(self, micro: tuple[int, ...]) -> Problem:
        """The problem, with everybody's largest micro-batch in it."""
        return self.problem if micro == self._micro else self.problem.holding(micro)

    def _hear_of_memory(self, answer: _Answer) -> None:
        self.problem, self._micro = self._holding(answer.micro), answer.micro
        for rank, samples in enumerate(answer.failed):
            if samples and rank != self._world.rank:
                log.warning("rank %d ran out of memory with %d samples: it computes %d at a time from now on",
                            rank, samples, answer.micro[rank])  # fmt: skip

    # What goes into the events

    def _log_rest(self, keep: int) -> None:
        rows = self._rows[: len(self._rows) - keep]
        self._rows = self._rows[len(rows) :]
        self._log_steps(rows, [self._clock.take() if row.took_part else None for row in rows])

    def _log_steps(self, rows: list[_Row], timings: list[Timing | None]) -> None:
        if rows and self._events:
            self._story.steps(
                self._logged,
                batch=[row.sizes[self._world.rank] for row in rows],
                busy=[round(t.busy, 6) if t else 0.0 for t in timings],
                wait=[round(t.wait, 6) if t else 0.0 for t in timings],
                data=[round(row.data, 6) if t else 0.0 for row, t in zip(rows, timings, strict=True)],
                loss=[None if row.loss is None else float(f"{float(row.loss):.6g}") for row in rows],
            )
        self._logged += len(rows)


def _mean_loss(rows: Sequence[_Row]) -> float:
    losses = [float(row.loss) for row in rows if row.took_part and row.loss is not None]
    losses = [loss for loss in losses if isfinite(loss)]
    return sum(losses) / len(losses) if losses else 0.0


def _try_to_send(state: State) -> None:
    """Once before the first step: it takes long the first time, and may not work."""
    try:
        pickle.loads(pickle.dumps(state))
    except Exception as error:
        raise UsageError(
            f"the policy's state cannot be sent to the other workers ({error}): {type(state).__name__} must be made of "
            f"what pickle can save, in a class that can be imported"
        ) from error
