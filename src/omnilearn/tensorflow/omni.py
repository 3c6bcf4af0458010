"""``OmniLearn`` for TensorFlow: the object the user's script talks to. Resolves options; the engines do the work."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from omnilearn.control import Policy
from omnilearn.data import Sampler
from omnilearn.engine import evaluation
from omnilearn.engine.facade import Facade, check_mode, check_names, check_save, check_timeout
from omnilearn.errors import OmniLearnError, UsageError
from omnilearn.tensorflow import checkpoint
from omnilearn.tensorflow.asynchronous.cluster import join
from omnilearn.tensorflow.asynchronous.step import Counts
from omnilearn.tensorflow.dataset import EvalDataset, TrainDataset, open_samples
from omnilearn.tensorflow.engine import SyncEngine, smallest_batch
from omnilearn.tensorflow.fit import Tester, Trainer
from omnilearn.tensorflow.world import World

log = logging.getLogger("omnilearn")


class OmniLearn(Facade):
    """Data-parallel training in which each worker's share of the global batch follows its speed.

    ::

        omni = OmniLearn(global_batch=512)     # before any tensor or model
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        omni.fit(model, (x, y), epochs=10)

    or, with a loop of your own::

        model, optimizer = omni.prepare(model, optimizer)
        for x, y in omni.dataset((x_all, y_all), shuffle=True):
            loss = omni.step(compute_loss, (x, y))

    ``global_batch``: samples per step, all workers together. It stays the same, so a learning rate chosen for it holds.
    ``mode``: "sync", or "async" (parameter servers; ``fit`` only, see docs/tensorflow.md).
    ``policy``: "optimal", "proportional", "static", "uniform", or an object with ``start``, ``update`` and ``restore``
    (``omnilearn.control.Policy``).
    ``min_batch``, ``max_batch``: bounds of an active worker's share (found: 2 with BatchNorm, else 1; no maximum).
    ``multiple_of``: shares are multiples of it. ``park``: whether a worker that slows the others down may sit out.
    ``micro_batch``: a share above it is computed in several passes, reduced once (gradient accumulation).
    ``nonfinite``: "raise" or "skip" a step whose gradient is not finite. ``device``: found; or "cpu", "gpu:1".
    ``staleness``: what becomes of late gradients in asynchronous mode, "apply", "scale", "discard" or "bounded", the
    last two beyond ``threshold`` (found: twice the number of workers). ``lr_scaling``: how the size of an asynchronous
    update follows its batch, "linear", "capped", "sqrt" or "none". ``log_dir``: where events go (docs/events.md); by
    default where ``omnilearn run`` says. ``seed``: of the order of samples. ``timeout``: of every wait for a peer, in
    seconds.
    """

    backend = "tensorflow"
    _checkpoint_file = checkpoint.FILE

    def __new__(cls, *args: Any, mode: str = "sync", **options: Any) -> OmniLearn:
        check_names(OmniLearn.__init__, options, "OmniLearn()")
        # Parameter servers and workers serve in join(), and do not come back.
        if cls is OmniLearn and mode == "async" and join():
            from omnilearn.tensorflow.asynchronous.omni import AsyncOmniLearn

            cls = AsyncOmniLearn
        return super().__new__(cls)

    def __init__(
        self,
        global_batch: int,
        *,
        mode: str = "sync",
        policy: str | Policy = "optimal",
        min_batch: int | None = None,
        max_batch: int | None = None,
        multiple_of: int = 1,
        park: bool | None = None,
        micro_batch: int | None = None,
        nonfinite: str = "raise",
        lr_scaling: str | None = None,
        staleness: str = "apply",
        threshold: int | None = None,
        device: str | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        seed: int = 0,
        timeout: float = 1800.0,
    ) -> None:
        check_timeout(timeout)
        self._world = self._meet_world(device, timeout)
        with self._world.alike():
            check_mode(mode, staleness, threshold, lr_scaling, park)
            kept = self._take_options(
                global_batch, policy, min_batch=min_batch, max_batch=max_batch, multiple_of=multiple_of, park=park,
                micro_batch=micro_batch, nonfinite=nonfinite, seed=seed,
            )  # fmt: skip
        if mode == "async":
            kept |= {"staleness": staleness, "threshold": threshold, "lr_scaling": lr_scaling or "linear"}
        self._open(mode, kept, log_dir)
        self._engine: SyncEngine | None = None
        self._fit: Trainer | None = None
        self._tests: Tester | None = None

    def _meet_world(self, device: str | None, timeout: float) -> World:
        return World(device, timeout)

    # Readable state

    @property
    def counts(self) -> Counts:
        """Updates applied, samples used, and gradients discarded, so far."""
        engine = self._prepared("counts")
        return Counts(engine.updates, engine.samples, 0)

    # Setting up

    def scope(self) -> Any:
        """Make and compile the model in here: ``with omni.scope():``. Needed in asynchronous mode alone."""
        return contextlib.nullcontext()

    def prepare(self, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Any:
        """The model and optimizer to use in the loop: the same objects, with rank 0's weights on all ranks.

        Call it once, on all ranks. The model must be built: give it an Input, or call it on a batch first.
        """
        with self._world.alike():
            self._check_prepared(model, optimizer)
            problem = self._found_problem(smallest_batch(model))
        self._engine = SyncEngine(
            self._world,
            self._policy,
            problem,
            model,
            optimizer,
            nonfinite=self._nonfinite,
            micro_batch=self._micro_batch,
            on_plan=self._announce,
            events=self._events,
        )
        atexit.register(self._at_exit)
        return model, optimizer

    def _check_prepared(self, model: Any, optimizer: Any) -> None:
        if self._engine is not None:
            raise UsageError("prepare() was called before: one OmniLearn object trains one model")
        if not isinstance(model, keras.Model) or not isinstance(optimizer, keras.optimizers.Optimizer):
            raise UsageError(f"prepare(model, optimizer) got {type(model).__name__} and {type(optimizer).__name__}")
        if keras.backend.backend() != "tensorflow":
            raise UsageError(f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=tensorflow")
        if not model.built:
            raise UsageError("the model has no weights yet: start it with keras.Input(…), or call it on a batch first")

    def _prepare_for_fit(self, model: keras.Model) -> None:
        if self._engine is None:
            self.prepare(model, model.optimizer)
        elif self._engine.model is not model or self._engine.optimizer is not model.optimizer:
            raise UsageError("fit() got another model or optimizer than prepare(): one OmniLearn trains one model")

    def dataset(
        self,
        data: Any,
        *,
        train: bool = True,
        shuffle: bool = False,
        drop_last: bool = False,
        last: str = "keep",
        batch_size: int | None = None,
    ) -> Any:
        """Batches of ``data`` for this worker: arrays, a tf.data.Dataset of known size, or a keras.utils.PyDataset.

        Training: each global batch is cut by the plan in force. ``train=False``: the samples are split by speed over
        those who evaluate, each one once; ``batch_size`` may be given.
        """
        engine = self._prepared("dataset()")
        with self._world.alike():
            if train and batch_size is not None:
                raise UsageError(
                    "dataset() takes no batch_size: each worker's batch is found: OmniLearn(global_batch=…)"
                )
            samples, shuffled = open_samples(data, shuffle and train, self.seed)
            if train:
                minimum = int(engine.planner.problem.minimum[0])
                sampler = Sampler(
                    samples.size,
                    engine.planner.plan.batches,
                    minimum=minimum,
                    shuffle=shuffled,
                    seed=self.seed,
                    last="drop" if drop_last else last,
                    smallest=smallest_batch(engine.model),
                )
        if not train:
            size = batch_size or max(1, self.global_batch // self.world_size)

            def part() -> range:
                planner = engine.planner
                return evaluation.part(
                    self.rank, engine.participants, samples.size, size, planner.state, planner.problem
                )

            def begin() -> None:
                engine.settle()
                engine.share_buffers()
                engine.restart_clock()

            return EvalDataset(samples, part, size, begin)
        dataset = TrainDataset(engine, samples, sampler)
        self._adopt(dataset, samples.size, shuffle)
        return dataset

    # In the loop

    def step(self, compute_loss: Callable[[Any], Any], batch: Any, *, weight: float | None = None) -> Any:
        """Forward, backward, reduction and optimizer step in one. Returns the loss of the whole global batch.

        ``compute_loss(batch)`` gives the mean loss of the batch; it is traced once, as by tf.function. ``weight``: what
        that mean is over, where it is not samples: the number of tokens, say.
        """
        return self._prepared("step()").take_step(compute_loss, batch, weight)

    def mean(self, value: Any, weight: float | None = None) -> Any:
        """The mean of ``value`` over the workers, weighted; the same on all of them.

        ``weight`` is by default the size of the batch under way inside the training loop, and 1 outside of it. A value
        with weight 0 does not count. Inside the loop it is over the workers that take part, outside over all.
        """
        engine = self._prepared("mean()")
        engine.settle()
        if weight is None:
            weight = float(engine.share.sizes[self.rank]) if engine.share is not None else 1.0
        array = np.asarray(value, dtype=np.float64)
        own = array * weight if weight else np.zeros_like(array)
        total = self._sum(np.append(own.reshape(-1), weight), "averaging a value")
        if total[-1] == 0:
            raise UsageError("mean() over workers whose weights are all 0")
        result = total[:-1] / total[-1]
        return float(result[0]) if array.size == 1 else result.reshape(array.shape)

    def agree(self, condition: Any, *, how: str = "any") -> bool:
        """Whether ``condition`` holds on any worker (``how="all"``: on all of them): the same answer on all.

        The way to stop together. Inside the loop it is over the workers that take part in the step.
        """
        if how not in ("any", "all"):
            raise UsageError(f"agree() takes how='any' or how='all', got {how!r}")
        engine = self._prepared("agree()")
        engine.settle("agree()")
        workers = engine.participants
        answers = self._world.gather(bool(condition), engine.group(workers) if len(workers) > 1 else None)
        return (any if how == "any" else all)(answers)

    def _sum(self, values: Any, doing: str) -> Any:
        """The sum over those who run the user's code now."""
        engine = self._prepared(doing)
        if len(engine.participants) < 2:
            return values
        with self._world.naming_the_culprit(doing):
            return engine.group(engine.participants).sum(values)

    # For Keras users

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
        """What ``model.fit`` does, on all workers: compiled loss and metrics, validation, callbacks; gives a History.

        ``data``: as for ``dataset``, samples being ``x``, ``(x, y)`` or ``(x, y, sample_weight)``. ``verbose``: "auto",
        0 (nothing), 1 (a bar), 2 (a line per epoch).
        """
        return self._trainer(model).fit(
            data, epochs, validation_data, callbacks, shuffle=shuffle, initial_epoch=initial_epoch, verbose=verbose
        )

    def evaluate(self, model: keras.Model, data: Any, *, batch_size: int | None = None) -> dict[str, float]:
        """The compiled loss and metrics over ``data``, each sample once, split over the workers; the same on all."""
        return self._trainer(model).evaluate(data, batch_size)

    def _trainer(self, model: keras.Model) -> Trainer:
        if self._fit is None or self._fit.model is not model:
            self._fit = Trainer(self, model)
        return self._fit

    def _tester(self, model: keras.Model) -> Tester:
        if self._tests is None or self._tests.model is not model:
            self._tests = Tester(model)
        return self._tests

    # Checkpoints

    def save(self, folder: str | os.PathLike[str], *, every: int | None = None, **extra: Any) -> None:
        """Write a checkpoint: model, optimizer, data position, controller, and ``extra``.

        Call it on all ranks: between epochs rank 0 writes, inside the loop the first rank that takes part (use storage
        that all machines see where parking may happen). A crash while saving never harms the checkpoint before it.
        ``every``: in the loop, after ``step()``, save after every so many steps of the job and else do nothing.
        """
        engine = self._prepared("save()")
        check_save(every, extra)
        if not self._is_due(every):
            return
        engine.settle()
        engine.share_buffers()
        workers = engine.participants
        group = engine.group(workers) if len(workers) > 1 else None
        error = None
        if self.rank == workers[0]:
            facts = {
                **self._position,
                "policy": self._policy_facts(),
                "extra": extra,
            }
            try:
                checkpoint.check_plain(extra)
                checkpoint.write(folder, engine.variables, facts)
                self._tell_checkpoint("saved", folder)
            except Exception as failure:
                error = f"rank {self.rank} cannot write a checkpoint to {folder}: {failure}"
        for message in filter(None, self._world.gather(error, group) if group else [error]):
            raise UsageError(message)
        engine.restart_clock()

    def _last_step(self) -> tuple[int, int]:
        if self._prepared("save()").source is None:
            raise self._no_loop()
        return max(self.global_step - 1, 0), self.global_step

    def load(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Continue from a checkpoint; call it on all ranks after ``prepare``. Returns what ``save`` got as extra.

        Rank 0 reads the file and sends it to the others. On another number of workers the run goes on with the next
        samples.
        """
        engine = self._between_loops("load()")
        facts: dict[str, Any] = {}
        with self._world.alike():
            if self._world.is_main:
                facts = checkpoint.read_into(folder, engine.variables)
        facts = self._world.gather(facts)[0]
        if self._world.control is not None:
            engine.send(self._world.control, source=0)
        self._resume(facts["policy"], facts["sampler"], facts.get("samplers"))
        if self._world.is_main:
            self._tell_checkpoint("loaded", folder, engine.step)
        return dict(facts["extra"])

    # The end

    def _finish(self) -> None:
        assert self._engine is not None
        self._engine.settle()
        self._engine.planner.drain()
        self._world.gather(None)  # nobody leaves while another may still need it

    def _let_go(self) -> None:
        atexit.unregister(self._at_exit)
        self._tracking.close()
        if self._engine is not None:
            self._engine.forget_loop()
            self._engine.planner.end_threads()
        self._world.close()

    def _at_exit(self) -> None:
        """A script that does not close: the parked may still wait to hear that the others left the loop."""
        if not self._world.failed:
            with contextlib.suppress(OmniLearnError, RuntimeError):
                self.close()
