"""Who waits where: so that workers which can never meet hear of it, and are told which line of their script it is.

A rank says what it waits for, and for whom, with ``begin`` and ``done``. After some seconds a thread writes it into the
job's store and reads what the others wait for. Two that wait for each other in different places can never meet, nor
can one meet another that has ended; then ``check`` raises. A rank that is merely still at work is named once, and
waited for. Nobody is asked while nothing stands still: a step costs two assignments.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from omnilearn.errors import OutOfStepError, PeerFailure

log = logging.getLogger("omnilearn")

TICK = 1.0
"""Seconds between two looks of the thread at its own rank."""
COMPARE_AFTER = 5.0
"""Seconds of waiting after which a rank compares with the others. A step may take so long: it costs two messages."""
SURE_AFTER = 20.0
"""The same where a message from one rank to another is waited for."""
NAME_AFTER = 30.0
"""Seconds of waiting after which the log says for whom, once."""
ANSWER_WITHIN = 5.0
"""Seconds in which a process that is alive says where it is, when it is asked."""
HARD_AFTER = 10.0
"""Seconds that a wait which cannot be interrupted has to end by itself, once it is known to be in vain."""
STORE_TIMEOUT = timedelta(seconds=20)

Workers = Sequence[int]
State = dict[str, Any]
"""What a rank says of itself: ``ended`` how, and whether it ``failed``; or the ``wait`` it is in, by number, with
``key``, ``text``, ``for`` whom and whether it is ``mutual``; or ``line``, where it is at work. ``asked``: the last
question it has heard."""


@dataclass(frozen=True)
class Place:
    """Where in the job a rank is when it waits. Two ranks meet only where theirs are equal.

    ``what`` they do together, at which ``step`` of the job, in which training ``loop``; ``detail`` is what else must be
    the same.
    """

    what: str
    step: int = 0
    loop: int = 0
    detail: str = ""

    @property
    def key(self) -> str:
        return f"{self.what}|{self.step}|{self.loop}|{self.detail}"

    def __str__(self) -> str:
        return f"{self.what} (step {self.step}{', ' * bool(self.detail)}{self.detail})"


@dataclass
class _Wait:
    """``mutual``: those it waits for have to do something themselves, and never will while they wait for this rank.
    Else something is on its way. ``patient``: the wait lasts for as long as they are alive."""

    number: int
    place: Place
    workers: tuple[int, ...]
    mutual: bool
    patient: bool
    interrupt: Callable[[], Any] | None
    since: float
    ask_at: float
    asked_at: float | None = None
    judged_at: float | None = None
    error: Exception | None = None


class Watch:
    """One per world of several ranks. ``store`` is the job's, for this world alone. ``timeout``: in seconds."""

    def __init__(self, store: Any, rank: int, timeout: Callable[[], float]) -> None:
        self._store, self._rank, self._timeout = store.clone(), rank, timeout
        self._store.set_timeout(STORE_TIMEOUT)
        self._main = threading.get_ident()
        self._wait: _Wait | None = None
        self._number = 0
        self._said: State = {}
        self._before: dict[int, int] = {}  # by rank, the wait that was seen there in the last look
        self._question = 0  # the last one that was heard
        self._store.set(self._key(rank), "{}")  # there is something to read before anybody asks
        _register()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omnilearn-watch", daemon=True)
        self._thread.start()

    # The rank's own side

    def begin(
        self,
        place: Place,
        workers: Workers,
        *,
        mutual: bool = True,
        patient: bool = False,
        interrupt: Callable[[], Any] | None = None,
    ) -> None:
        """This rank waits now. ``interrupt`` ends a wait that does not call ``check`` meanwhile."""
        self._number += 1
        now = time.monotonic()
        ask_at = now + (self._timeout() if patient else min(NAME_AFTER, self._timeout() / 2))
        self._wait = _Wait(self._number, place, tuple(workers), mutual, patient, interrupt, now, ask_at)

    def done(self) -> None:
        self._wait = None

    @contextlib.contextmanager
    def waiting(self, place: Place, workers: Workers, **how: Any) -> Iterator[None]:
        self.begin(place, workers, **how)
        try:
            yield
        except Exception:
            self.check()  # it may have been interrupted because of this
            raise
        finally:
            self.done()

    def check(self) -> None:
        """Raise if the wait under way is in vain."""
        if self._wait is not None and self._wait.error is not None:
            raise self._wait.error

    def end(self, how: str, *, failed: bool = False) -> None:
        """This rank comes to no place any more: whoever waits for it should know."""
        with contextlib.suppress(Exception):
            self._say({"ended": how, "failed": failed})

    def ended(self, workers: Workers) -> str:
        """Who of these has said that it ended, and how ("": nobody)."""
        with contextlib.suppress(Exception):
            for rank, state in self._read(workers).items():
                if "ended" in state:
                    return f"rank {rank} {state['ended']}"
        return ""

    def close(self) -> None:
        """End the thread. Before the process ends: Python aborts a process whose daemon threads wait in C++."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(STORE_TIMEOUT.total_seconds() + TICK)

    # The thread's

    def _run(self) -> None:
        try:
            turn = 0
            while not self._stop.wait(TICK) and "ended" not in self._said:
                turn += 1
                listens = turn * TICK >= ANSWER_WITHIN / 2
                turn = 0 if listens else turn
                with _forking:
                    self._turn(listens)
        except Exception as error:  # the store is gone, and soon its connections
            log.debug("the watch over waiting ends: %s", error)

    def _turn(self, listens: bool) -> None:
        if listens:
            self._question = int(self._store.add("asked", 0))
        wait = self._wait
        if wait is not None and time.monotonic() - wait.since >= COMPARE_AFTER:
            self._look(wait)
            return
        self._before = {}
        heard = self._question > self._said.get("asked", 0)
        if heard or "wait" in self._said:
            self._say({"line": line_of(self._main), "asked": self._question} if heard else {})

    @staticmethod
    def _key(rank: int) -> str:
        return f"place/{rank}"

    def _say(self, state: State) -> None:
        if state != self._said:
            self._said = state
            self._store.set(self._key(self._rank), json.dumps(state))

    def _read(self, workers: Workers) -> dict[int, State]:
        others = [rank for rank in workers if rank != self._rank]
        texts = self._store.multi_get([self._key(rank) for rank in others]) if others else []
        return {rank: json.loads(text) for rank, text in zip(others, texts, strict=True)}

    def _look(self, wait: _Wait) -> None:
        here = f"{wait.place}{at(line_of(self._main))}"
        self._say({"wait": wait.number, "key": wait.place.key, "text": here, "for": wait.workers,
                   "mutual": wait.mutual and self._sure(wait), "asked": self._question})  # fmt: skip
        there = self._read(wait.workers)
        if wait.judged_at is not None:
            self._insist(wait, wait.judged_at)
        elif failed := [rank for rank, state in there.items() if state.get("failed")]:
            self._judge(wait, PeerFailure(
                f"rank {failed[0]} {there[failed[0]]['ended']} (rank {self._rank} waited in {here})"
            ))  # fmt: skip
        elif apart := self._apart(wait, there):
            told = "; ".join(f"rank {rank} {what}" for rank, what in sorted(apart.items()))
            self._judge(wait, OutOfStepError(
                f"the workers can never meet: rank {self._rank} waits in {here}; {told}: what workers do together "
                f"(the steps of a loop, mean, agree, save, evaluation) must come in the same order on all of them: "
                f"count by omni.global_step, and stop together by omni.agree(condition)"
            ))  # fmt: skip
        else:
            self._ask(wait, here, there)

    def _sure(self, wait: _Wait) -> bool:
        """A message from rank to rank may be on its way behind a large one."""
        limit = min(SURE_AFTER, self._timeout() / 2) if wait.interrupt is not None else COMPARE_AFTER
        return time.monotonic() - wait.since >= limit

    def _apart(self, wait: _Wait, there: dict[int, State]) -> dict[int, str]:
        """Who will never come, and where it is. Seen twice: a wait that just ended may still be written there."""
        apart: dict[int, str] = {}
        seen: dict[int, int] = {}
        for rank, state in there.items():
            if "ended" in state:
                apart[rank] = state["ended"]
            elif wait.mutual and self._sure(wait) and state.get("mutual") and self._rank in state["for"]:
                seen[rank] = state["wait"]
                if state["key"] != wait.place.key and self._before.get(rank) == state["wait"]:
                    apart[rank] = f"waits in {state['text']}"
        self._before = seen
        return apart

    def _ask(self, wait: _Wait, here: str, there: dict[int, State]) -> None:
        """Who keeps this rank waiting? Where it only listens: are they alive?"""
        now = time.monotonic()
        if wait.asked_at is None:
            if now >= wait.ask_at:
                wait.asked_at, self._question = now, int(self._store.add("asked", 1))
        elif now - wait.asked_at >= ANSWER_WITHIN:
            silent = [rank for rank, state in there.items() if state.get("asked", 0) < self._question]
            if not wait.patient:
                told = [f"rank {rank}, which says nothing (frozen?)" for rank in silent]
                told += [f"rank {rank}, which is at work{at(state['line'])}" for rank, state in there.items()
                         if "line" in state and rank not in silent]  # fmt: skip
                if told:
                    log.warning("rank %d waits in %s since %.0f s, for %s", self._rank, here, now - wait.since,
                                "; ".join(told[:4]))  # fmt: skip
                wait.ask_at = float("inf")
            elif silent:
                self._judge(wait, PeerFailure(
                    f"rank {silent[0]} has given no sign of life for {now - wait.since:.0f} s, while rank "
                    f"{self._rank} waited in {here}: is it frozen, or its machine gone?"
                ))  # fmt: skip
            else:
                wait.ask_at = now + self._timeout()
            wait.asked_at = None

    @staticmethod
    def _judge(wait: _Wait, error: Exception) -> None:
        wait.error, wait.judged_at = error, time.monotonic()
        if wait.interrupt is not None:
            with contextlib.suppress(Exception):
                wait.interrupt()

    def _insist(self, wait: _Wait, since: float) -> None:
        """A wait somewhere in torch that does not come back: the process ends, as it would stand still for long."""
        if self._wait is wait and time.monotonic() - since > HARD_AFTER:
            print(f"omnilearn: {wait.error}", file=sys.stderr, flush=True)
            self.end(f"has ended: {wait.error}")
            os._exit(1)


_forking = threading.Lock()
"""A process is not forked (for a DataLoader's workers) while a watch is in C++: what it has locked there would stay
locked in the child."""


CALM = 0.005
"""Seconds before a fork in which gloo's threads come to rest: they ask for Python's lock where they are the last to let
go of a tensor, and a process forked in that moment stands still (CPython 3.11 and before; pytorch issue 75147)."""


@lru_cache
def _register() -> None:
    def before() -> None:
        time.sleep(CALM)
        _forking.acquire()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=_forking.release, after_in_child=_forking.release)


def at(line: str) -> str:
    return f", {line}" if line else ""


def line_of(thread: int) -> str:
    """The line of the user's script in which this thread is: "train.py:33"; "" where it is in none."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith("<") and not os.path.abspath(path).startswith(_libraries()):
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _libraries() -> tuple[str, ...]:
    """Folders whose code is not the user's."""
    if not _known:
        found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        found |= {str(Path(__file__).resolve().parents[1]), *site.getsitepackages()}
        _known.extend(str(folder) + os.sep for folder in found)
    return tuple(_known)


_known: list[str] = []
