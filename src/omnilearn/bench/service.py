"""A worker of a gang, whatever it trains with: does what it is told over a socket, one request after the other.

Every request is the name of a method of a ``Member`` and its arguments; every answer is its result, or the traceback.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from omnilearn.bench.block import Block
from omnilearn.cluster.resources import cores
from omnilearn.control import Optimal, Policy, Proportional
from omnilearn.errors import InfeasibleError, UsageError


class Member:
    """What workers do alike. A framework adds the start and the end of a session, and its ways of training."""

    omni: ClassVar[type[Any]]
    """``omni(job, steps, policy, **options)``: OmniLearn as a contestant."""
    local_steps: ClassVar[Callable[..., Any]]

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.job: Any = None
        self.contestants: dict[str, Any] = {}
        self._told: int | None = None  # the file that says how many threads each worker has
        self._threads = 0

    def ready(self, devices: list[str], told: Path) -> dict[str, Any]:
        """The first request: everything is imported when it is answered."""
        self._told = os.open(told, os.O_RDONLY)
        self.follow()
        return {"cores": cores(), "pid": os.getpid()}

    def follow(self) -> None:
        """Compute with as many threads as this worker is told to: asked before each request, and before each step."""
        if self._told is None:
            return
        said = os.pread(self._told, 1, self.rank)[0]
        if said != self._threads:
            self._threads = said
            self.set_threads(said)

    def set_threads(self, count: int) -> None:
        raise NotImplementedError

    @property
    def _job(self) -> Any:
        assert self.job is not None, "begin a session first"
        return self.job

    def open_omni(self, name: str, steps: int, policy: str, options: dict[str, Any]) -> None:
        self.contestants[name] = self.omni(self._job, steps, named_policy(policy), **options)

    def close(self, name: str) -> None:
        contestant = self.contestants.pop(name)
        if isinstance(contestant, self.omni):
            contestant.close()

    def forget(self) -> None:
        """Forget everything of the session."""
        for name in list(self.contestants):
            self.close(name)
        self.job = None
        gc.collect()

    def block(self, name: str, *arguments: Any) -> Block:
        result: Block = self.contestants[name].block(*arguments)
        return result

    def reasons(self, name: str) -> list[tuple[int, tuple[int, ...], str]]:
        """Every plan OmniLearn decided on: the step from which it held, the batches, why."""
        return list(self.contestants[name].reasons)

    def curve(self, sizes: list[list[int]], repeats: int, seconds: float) -> list[tuple[int, float]]:
        return list(type(self).local_steps(self._job, sizes[self.rank], repeats, seconds))


def serve(member: Callable[[int, int], Any]) -> None:
    """Answer requests until the socket is closed; arguments of the process: FD RANK SIZE."""
    descriptor, rank, size = map(int, sys.argv[1:])
    pipe, served = Connection(descriptor), member(rank, size)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            break
        name, args = request
        try:
            served.follow()
            answer = ("done", getattr(served, name)(*args))
        except (UsageError, InfeasibleError) as error:
            answer = ("refused", str(error))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        pipe.send(answer)
    os._exit(0)  # nothing is left to be tidied up, and the framework's threads need not be waited for


def named_policy(text: str) -> str | Policy:
    """A policy by a name that can be sent: ``optimal``, ``optimal from uniform``, ``proportional every 20``."""
    word, _, option = text.partition(" ")
    if option == "from uniform":
        return Optimal(first="uniform") if word == "optimal" else Proportional(first="uniform")
    if option.startswith("every "):
        return Proportional(every=int(option.removeprefix("every ")))
    return text
