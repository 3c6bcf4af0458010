"""Three real TensorFlow workers that run a function together, started once and reused by many tests.

TensorFlow's runtime can be booted once per process, for a fixed cluster: tests with fewer workers park the others.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

from omnilearn.cluster.ports import free_ports

SIZE = 3
LIMIT = 90.0


class WorkerError(AssertionError):
    """What a rank raised, with its traceback."""

    def __init__(self, errors: dict[int, tuple[str, str]]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, (_, text) in errors.items()))
        self.errors = errors


def cluster(size: int) -> dict[str, list[str]]:
    """Workers on free ports."""
    return {"worker": [f"127.0.0.1:{port}" for port in free_ports(size)]}


def _serve(pipe: Connection, rank: int, workers: dict[str, list[str]]) -> None:
    os.environ["TF_CONFIG"] = json.dumps({"cluster": workers, "task": {"type": "worker", "index": rank}})
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", OMP_NUM_THREADS="1", RANK=str(rank))
    os.environ.pop("OMNILEARN_LOG_DIR", None)
    from tests.tensorflow import work

    work.boot()
    while (job := pipe.recv()) is not None:
        name, args = job
        try:
            outcome: Any = ("done", getattr(work, name)(*args))
        except BaseException as error:
            outcome = ("failed", (type(error).__name__, "".join(traceback.format_exception(error))))
        pipe.send(outcome)
    os._exit(0)


class Gang:
    """``run("function of tests/tensorflow/work.py", …)`` on all three."""

    def __init__(self) -> None:
        self.members: list[tuple[Any, Connection]] = []

    def _start(self) -> None:
        context, workers = mp.get_context("spawn"), cluster(SIZE)
        for rank in range(SIZE):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, workers))
            process.start()
            theirs.close()
            self.members.append((process, mine))

    def run(self, function: str, *args: Any) -> list[Any]:
        """Every rank's result, or a WorkerError with every rank's error."""
        if not self.members:
            self._start()
        for _, pipe in self.members:
            pipe.send((function, args))
        outcomes: dict[int, Any] = {}
        while len(outcomes) < SIZE:
            pipes = {pipe: rank for rank, (_, pipe) in enumerate(self.members) if rank not in outcomes}
            ready = wait(list(pipes), timeout=LIMIT)
            if not ready:
                self.close(kill=True)
                said = {rank: value for rank, (how, value) in outcomes.items() if how == "failed"}
                late = sorted(pipes.values())
                raise AssertionError(f"ranks {late} did not finish {function} in {LIMIT} s; {WorkerError(said)}")
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    outcomes[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    process = self.members[rank][0]
                    process.join(timeout=10)
                    self.close(kill=True)
                    raise AssertionError(f"rank {rank} ended in {function} (status {process.exitcode})") from None
        failed = {rank: value for rank, (how, value) in sorted(outcomes.items()) if how == "failed"}
        if failed:
            raise WorkerError(failed)
        return [outcomes[rank][1] for rank in range(SIZE)]

    def close(self, kill: bool = False) -> None:
        for process, pipe in self.members:
            if kill:
                process.kill()
            else:
                with contextlib.suppress(OSError):
                    pipe.send(None)
        for process, _ in self.members:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join(timeout=10)
        self.members = []
