"""A gang of real processes that run a function together, as ranks of one job. Started once, reused by many tests.

Functions must be importable. Each run has its own store on a free port, hosted here, as torchrun's agent does it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import re
import signal
import tempfile
import time
import traceback
import warnings
from math import ceil
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore

LIMIT = 60.0
SLICE = 5.0
"""The limit is waited for in slices: a machine that stands still for a minute has not given anybody a minute."""


class WorkerError(AssertionError):
    """What a rank raised, with its traceback."""

    def __init__(self, errors: dict[int, tuple[str, str]]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, (_, text) in errors.items()))
        self.errors = errors


class StuckFork(AssertionError):
    """A rank waited for a data worker that it had forked: to begin, to answer or to end."""


def _shortened(stacks: str, frames: int = 7) -> str:
    """The innermost frames of each thread, without the folders that all files lie in."""
    threads = [thread.splitlines()[: frames + 1] for thread in stacks.split("\n\n")]
    return "\n".join(re.sub(r'"/.*?/(?=[^/]+/[^/]+")', '"', line) for thread in threads for line in thread)


def _serve(pipe: Connection, stacks: str) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, open(stacks, "a"))  # noqa: SIM115 (also for processes forked here)
    mp.set_start_method("fork", force=True)  # what a script started by torchrun has
    home = dict(os.environ)
    while (job := pipe.recv()) is not None:
        module, name, args, environment = job
        os.environ.clear()
        os.environ.update({**home, **environment})
        try:
            outcome: Any = ("done", getattr(importlib.import_module(module), name)(*args))
        except BaseException as error:
            outcome = ("failed", (type(error).__name__, "".join(traceback.format_exception(error))))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        gc.collect()  # persistent DataLoader workers end with their loader
        pipe.send(outcome)


class Gang:
    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []
        self._stacks = tempfile.NamedTemporaryFile("r", prefix="omnilearn-stacks-")  # noqa: SIM115

    def run(
        self, size: int, function: Any, *args: Any, environment: dict[int, dict[str, str]] | None = None
    ) -> list[Any]:
        """Run ``function(*args)`` on ranks 0 … size-1; their results, or a WorkerError with every rank's error.

        Where a rank's forked data worker never answers, once more with new processes: forking a process that has
        threads, as gloo's, may leave a lock taken for ever in the child (pytorch#75147, #130610). A warning says where.
        """
        try:
            return self._run(size, function, *args, environment=environment)
        except StuckFork as stuck:
            warnings.warn(str(stuck), stacklevel=2)
            return self._run(size, function, *args, environment=environment)

    def _run(self, size: int, function: Any, *args: Any, environment: dict[int, dict[str, str]] | None) -> list[Any]:
        while len(self._members) < size:
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._stacks.name), daemon=False)
            process.start()
            theirs.close()
            self._members.append((process, mine))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        members = self._members[:size]
        for rank, (_, pipe) in enumerate(members):
            settings = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                **(environment or {}).get(rank, {}),
            }
            pipe.send((function.__module__, function.__qualname__, args, settings))
        outcomes: dict[int, Any] = {}
        while len(outcomes) < size:
            pipes = [pipe for rank, (_, pipe) in enumerate(members) if rank not in outcomes]
            ready = next(filter(None, (wait(pipes, timeout=SLICE) for _ in range(ceil(LIMIT / SLICE)))), None)
            if not ready:
                late = [rank for rank in range(size) if rank not in outcomes]
                stacks = self._where([members[rank][0].pid for rank in late])
                self.close(kill=True)
                said = {rank: value for rank, (how, value) in outcomes.items() if how == "failed"}
                kind = StuckFork if "data/dataloader.py" in stacks else AssertionError
                raise kind(
                    f"ranks {late} did not finish {function.__qualname__} within {LIMIT} s; others: "
                    f"{WorkerError(said)}\n{stacks}"
                )
            for pipe in ready:
                rank = next(r for r, (_, p) in enumerate(members) if p is pipe)
                outcomes[rank] = pipe.recv()
        failed = {rank: value for rank, (how, value) in sorted(outcomes.items()) if how == "failed"}
        if failed:
            raise WorkerError(failed)
        return [outcomes[rank][1] for rank in range(size)]

    def _where(self, pids: list[int]) -> str:
        """What each thread of these processes, and of the processes they started, is at: the latter first."""
        self._stacks.seek(0, os.SEEK_END)
        texts = []
        ranks = [psutil.Process(pid) for pid in pids]
        for process in [child for rank in ranks for child in rank.children(recursive=True)] + ranks:
            with contextlib.suppress(psutil.Error):
                title = f"process {process.pid}, child of {process.ppid()}, {process.status()}"
                process.send_signal(signal.SIGUSR1)
                time.sleep(0.5)
                texts.append(f"{title}:\n{_shortened(self._stacks.read())}")
        return "\n".join(texts)

    def close(self, kill: bool = False) -> None:
        for process, pipe in self._members:
            if kill:
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()  # a stuck one would outlive its rank
                process.kill()
            else:
                pipe.send(None)
        for process, _ in self._members:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join(timeout=10)
        self._members = []
