"""One TensorFlow worker of a benchmark's gang. Run as ``python -m omnilearn.bench.tf_member FD RANK SIZE``.

TensorFlow takes its number of threads once, before it computes anything: ``threads`` counts until the first session.
"""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any

import tensorflow as tf

from omnilearn.bench.block import Block
from omnilearn.bench.service import named_policy, serve
from omnilearn.bench.tf_contestants import TIMEOUT, Job, Omni, Plain, local_steps
from omnilearn.bench.tf_workloads import workload
from omnilearn.cluster.resources import cores
from omnilearn.tensorflow.engine import smallest_batch
from omnilearn.tensorflow.world import World

POOL = 4
"""Global batches of data that are held."""


class Member:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._world: World | None = None
        self.job: Job | None = None
        self.contestants: dict[str, Any] = {}

    def ready(self, device: str) -> dict[str, Any]:
        """The first request: everything is imported when it is answered."""
        return {"cores": cores(), "pid": os.getpid()}

    def threads(self, counts: list[int]) -> None:
        with contextlib.suppress(RuntimeError):
            tf.config.threading.set_intra_op_parallelism_threads(counts[self.rank])

    def begin(self, address: str, port: int, name: str, size: str, watch: bool) -> int:
        """Meet the others and get the data of a workload: the start of a session. Returns the model's least batch."""
        if self._world is None:
            self._world = World("cpu", TIMEOUT)
        what = workload(name, size)
        x, y = what.data(POOL * what.global_batch)
        self.job = Job(what, x, y, self._world, watch)
        return smallest_batch(what.model())

    def end(self) -> None:
        """Forget everything of the session."""
        for name in list(self.contestants):
            self.close(name)
        self.job = None
        tf.keras.backend.clear_session()
        gc.collect()

    @property
    def _job(self) -> Job:
        assert self.job is not None, "begin a session first"
        return self.job

    def open_plain(self, name: str, options: dict[str, Any]) -> None:
        self.contestants[name] = Plain(self._job, **options)

    def open_omni(self, name: str, steps: int, policy: str, options: dict[str, Any]) -> None:
        self.contestants[name] = Omni(self._job, steps, named_policy(policy), **options)

    def close(self, name: str) -> None:
        contestant = self.contestants.pop(name)
        if isinstance(contestant, Omni):
            contestant.close()

    def block(self, name: str, *arguments: Any) -> Block:
        result: Block = self.contestants[name].block(*arguments)
        return result

    def reasons(self, name: str) -> list[tuple[int, tuple[int, ...], str]]:
        """Every plan OmniLearn decided on: the step from which it held, the batches, why."""
        return list(self.contestants[name].reasons)

    def curve(self, sizes: list[list[int]], repeats: int, seconds: float) -> list[tuple[int, float]]:
        return list(local_steps(self._job, sizes[self.rank], repeats, seconds))


if __name__ == "__main__":
    serve(Member)
