"""``OmniLearn(mode="async")`` where there are parameter servers: the same words, as far as the strategy allows."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import keras
import numpy as np
import tensorflow as tf

from omnilearn.control import Plan, Problem
from omnilearn.engine.journal import Journal
from omnilearn.engine.planning import Planning
from omnilearn.errors import UsageError
from omnilearn.tensorflow import checkpoint
from omnilearn.tensorflow.asynchronous.cluster import Cluster
from omnilearn.tensorflow.asynchronous.engine import AsyncEngine
from omnilearn.tensorflow.asynchronous.step import Counts, Rules, Walk
from omnilearn.tensorflow.dataset import open_samples
from omnilearn.tensorflow.engine import smallest_batch
from omnilearn.tensorflow.fit import build, callback_list, check, drive, plain
from omnilearn.tensorflow.omni import OmniLearn
from omnilearn.tensorflow.world import World


class AsyncOmniLearn(OmniLearn):
    """See ``OmniLearn`` and docs/tensorflow.md. Runs on the chief alone."""

    def _meet_world(self, device: str | None, timeout: float) -> World:
        self._cluster = Cluster()
        self._continues = False  # a checkpoint was loaded, and nothing done since
        self._saved_at = 0  # by save(every=…)
        return World(device, timeout, alone=True)

    def _write_run(self, mode: str, options: dict[str, Any]) -> None:
        self._options = {"mode": mode, **options}  # written with the first epoch

    @property
    def _chief(self) -> AsyncEngine:
        return cast(AsyncEngine, self._prepared("this"))

    # Readable state

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self._cluster.size

    @property
    def plan(self) -> Plan:
        return self._chief.planning.plan

    @property
    def epoch(self) -> int:
        return 0 if self._engine is None else self._chief.epoch

    @property
    def global_step(self) -> int:
        """Global batches of samples that were used so far, over epochs and restarts."""
        self._prepared("global_step")
        return int(self._chief.step)

    @property
    def counts(self) -> Counts:
        """What was done so far, as the parameter servers counted it."""
        return self._chief.shared.counts()

    # Setting up

    def scope(self) -> Any:
        return self._cluster.strategy.scope()

    def prepare(self, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Any:
        """Take over a model and optimizer made inside ``omni.scope()``. ``fit`` does it too; ``load`` needs it."""
        self._check_prepared(model, optimizer)
        with self.scope():
            optimizer.build(model.trainable_variables)
        minimum = max(self._min_batch or smallest_batch(model), self._multiple_of)
        options, workers = self._options, self._cluster.size
        threshold = 2 * workers if options["threshold"] is None else options["threshold"]
        engine = AsyncEngine(
            self._cluster,
            Planning(self._policy, lambda speeds: self._problem(speeds, minimum)),
            Journal(self._events, self.backend, options),
            model,
            optimizer,
            global_batch=self.global_batch,
            rules=Rules(options["staleness"], threshold, options["lr_scaling"], self.global_batch / workers),
            nonfinite=self._nonfinite,
            timeout=self._world.timeout,
            on_plan=self._announce,
            events=self._events,
        )
        self._engine = cast(Any, engine)
        atexit.register(self._at_exit)
        return model, optimizer

    def _problem(self, speeds: Any, minimum: int) -> Problem:
        return Problem.of(
            self.global_batch, speeds=speeds, minimum=minimum, maximum=self._max_batch, multiple_of=self._multiple_of,
            park=False,
        )  # fmt: skip

    def dataset(self, data: Any, **options: Any) -> NoReturn:
        self._refuse("dataset()")

    def step(self, compute_loss: Callable[[Any], Any], batch: Any, *, weight: float | None = None) -> NoReturn:
        self._refuse("step()")

    def mean(self, value: Any, weight: float | None = None) -> NoReturn:
        self._refuse("mean()")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} is of mode='sync': with parameter servers only the chief runs the script, and the workers compute "
            f"what it hands out: train by omni.fit(model, data)"
        )

    # Training

    def fit(
        self,
        model: keras.Model,
        data: Any,
        epochs: int = 1,
        *,
        validation_data: Any = None,
        callbacks: Sequence[Any] | None = None,
        shuffle: bool = True,
        initial_epoch: int | None = None,
        verbose: str | int = "auto",
    ) -> keras.callbacks.History:
        check(model, callbacks)
        arrays = _in_memory(data)
        with self.scope():
            build(model, tf.nest.map_structure(lambda part: part[:1], arrays))
        self._prepare_for_fit(model)
        engine = self._chief
        walk = Walk(arrays, self._cluster.size, shuffle, self.seed)
        engine.feed(walk)
        if not self._continues:
            engine.epoch, engine.goal = 0, engine.shared.counts().samples
        self._continues = False
        start = engine.epoch if initial_epoch is None else initial_epoch
        calls = callback_list(True, model, callbacks, verbose, epochs, -(-walk.size // self.global_batch))

        def train(epoch: int) -> dict[str, float]:
            model.reset_metrics()
            engine.run_epoch(epoch, lambda number, loss: calls.on_train_batch_end(number, {"loss": loss}))
            return plain(model.get_metrics_result())

        validate = None if validation_data is None else lambda: self.evaluate(model, validation_data)
        return drive(model, calls, range(start, epochs), train, validate, bool)

    def evaluate(self, model: keras.Model, data: Any, *, batch_size: int | None = None) -> dict[str, float]:
        """The compiled loss and metrics over ``data``, by the chief, with the parameters as they are now."""
        samples, _ = open_samples(data, False, 0)
        each = batch_size or self.global_batch
        starts = range(0, samples.size, each)
        batches = (samples.fetch(np.arange(start, min(start + each, samples.size)), 0) for start in starts)
        return self._tester(model).run(batches)

    # Checkpoints

    def save(self, folder: str | os.PathLike[str], *, every: int | None = None, **extra: Any) -> None:
        """Write a checkpoint: model, optimizer, counts, everybody's position in the data, controller, and ``extra``.

        Also in the middle of an epoch, from a callback: the steps under way are waited for, and none begins meanwhile.
        ``every``: once for every so many global batches.
        """
        engine = self._chief
        if not self._is_due(every):
            return
        self._saved_at = self.global_step
        checkpoint.check_plain(extra)
        with engine.rest():
            facts = {
                "sampler": None,
                "asynchronous": engine.state_dict(),
                "policy": engine.planning.saved(),
                "extra": extra,
            }
            try:
                checkpoint.write(folder, engine.variables, facts)
            except OSError as failure:
                raise UsageError(f"the chief cannot write a checkpoint to {folder}: {failure}") from failure
        self._tell_checkpoint("saved", folder, engine.step)

    def load(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Continue from a checkpoint; call it after ``prepare``. Returns what ``save`` got as extra.

        Also on another number of workers. One of synchronous mode gives model and optimizer alone.
        """
        engine = self._between_loops("load()")
        facts = checkpoint.read_into(folder, engine.variables)
        if "asynchronous" in facts:
            engine.load_state_dict(facts["asynchronous"], facts["policy"])
            self._continues, self._saved_at = True, self.global_step
        self._tell_checkpoint("loaded", folder, engine.step)
        return dict(facts["extra"])

    def _between_loops(self, what: str) -> AsyncEngine:
        self._prepared(what)
        if self._chief.running:
            raise UsageError(f"{what} inside the training loop: call it before")
        return self._chief

    def _last_step(self) -> tuple[int, int]:
        if not self._chief.running:
            raise self._no_loop()
        return self._saved_at, self.global_step

    # The end

    def _finish(self) -> None:
        """The workers compute what the chief hands out: they need not be told."""


def _in_memory(data: Any) -> Any:
    """The data as arrays: they go to each worker once, with the step."""
    samples, _ = open_samples(data, False, 0)
    return tf.nest.map_structure(np.asarray, samples.fetch(np.arange(samples.size), 0))
