"""One TensorFlow worker of a benchmark's gang. Run as ``python -m omnilearn.bench.tf_member FD RANK SIZE``.

TensorFlow takes its number of threads once, before it computes anything: changes count until the first session.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from omnilearn.bench.service import Member, serve
from omnilearn.bench.tf_contestants import TIMEOUT, Job, Omni, Plain, local_steps
from omnilearn.bench.tf_workloads import workload
from omnilearn.tensorflow.engine import smallest_batch
from omnilearn.tensorflow.world import World

POOL = 4
"""Global batches of data that are held."""


class Worker(Member):
    omni, local_steps = Omni, local_steps

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._world: World | None = None

    def set_threads(self, count: int) -> None:
        with contextlib.suppress(RuntimeError):
            tf.config.threading.set_intra_op_parallelism_threads(count)

    def begin(self, address: str, port: int, name: str, size: str, watch: bool) -> int:
        """Meet the others and get the data of a workload: the start of a session. Returns the model's least batch."""
        if self._world is None:
            self._world = World("cpu", TIMEOUT)
        what = workload(name, size)
        x, y = what.data(POOL * what.global_batch)
        self.job = Job(what, x, y, self._world, watch)
        return smallest_batch(what.model())

    def end(self) -> None:
        self.forget()
        tf.keras.backend.clear_session()

    def open_plain(self, name: str, options: dict[str, Any]) -> None:
        self.contestants[name] = Plain(self._job, **options)


if __name__ == "__main__":
    serve(Worker)
