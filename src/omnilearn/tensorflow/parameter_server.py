"""The asynchronous engine: ParameterServerStrategy keeps the model on parameter servers, workers update it one by one.

The chief hands out steps through a ClusterCoordinator, which gives each to whichever worker is free, and to another one
where a worker dies. A step asks which worker it runs on, takes that worker's batch size from a variable, and times
pull, compute and push apart; so batches change without tracing anything again. Workers and parameter servers run
TensorFlow's own server and nothing of the user's script after ``OmniLearn(mode="async")``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from omnilearn.control import Policy, Problem, Report
from omnilearn.errors import InfeasibleError, PeerFailure, UsageError
from omnilearn.observe import EventLog
from omnilearn.tensorflow.dataset import open_samples
from omnilearn.tensorflow.fit import build, callback_list, check, loss_of, plain
from omnilearn.tensorflow.world import config

if TYPE_CHECKING:
    from omnilearn.tensorflow.omni import OmniLearn

log = logging.getLogger("omnilearn")

AHEAD = 2
"""Steps under way for each worker, so that none waits for the chief."""
THRESHOLD = 8
"""With staleness="discard", gradients older than this many updates are dropped."""
AT_END = 30.0
"""Seconds to wait for the steps under way when one has failed."""
WALKS = 256
"""Different orders of the samples, after which they come again."""
FACTS = ("worker", "batch", "pull", "compute", "push", "loss", "staleness", "applied")


def join() -> bool:
    """Serve, where TF_CONFIG makes this process a worker or a parameter server: then it does not come back.

    Returns whether there is a cluster: False means that this process trains alone.
    """
    found = config()
    if not found:
        return False
    cluster, kind = found["cluster"], found["task"].get("type")
    if not cluster.get("ps") or not cluster.get("worker") or not cluster.get("chief"):
        raise UsageError(
            f"mode='async' needs a chief, workers and parameter servers, TF_CONFIG has {', '.join(cluster)}: start it "
            f"with omnilearn run --framework tensorflow --nproc 3 --ps 1"
        )
    if kind in ("worker", "ps"):
        _serve(cluster, kind, found["task"]["index"])
    if kind != "chief":
        raise UsageError(f"TF_CONFIG makes this process a {kind!r}: mode='async' has a chief, workers and ps")
    return True


def _serve(cluster: Any, kind: str, index: int) -> NoReturn:
    server = tf.distribute.Server(tf.train.ClusterSpec(cluster), kind, index, protocol="grpc", start=True)
    server.join()  # until the launcher ends this process
    sys.exit(0)


@dataclass
class Counts:
    """What was done, as the parameter servers counted it."""

    updates: int
    samples: int
    discarded: int


class AsyncEngine:
    """The chief's side."""

    def __init__(
        self,
        global_batch: int,
        policy: Policy,
        *,
        bounds: tuple[int | None, int | None, int],
        lr_scaling: str,
        staleness: str,
        seed: int,
        events: EventLog,
    ) -> None:
        if staleness == "bounded":
            raise InfeasibleError(
                "staleness='bounded' cannot be had with TensorFlow: the coordinator gives a step to whichever worker "
                "is free, so that nobody can be made to wait: use 'apply', 'scale' or 'discard'"
            )
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
        self.size = len(config()["cluster"]["worker"])
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        self.global_batch, self._policy, self._events = global_batch, policy, events
        self._lr_scaling, self._staleness, self._seed = lr_scaling, staleness, seed
        least, most, multiple = bounds
        self.problem = Problem.of(
            global_batch, workers=self.size, minimum=max(least or 1, multiple), maximum=most, multiple_of=multiple,
            park=False,
        )  # fmt: skip
        self.state = policy.start(self.problem)
        with self.strategy.scope():
            self._batches = tf.Variable(self.state.plan.batches, dtype=tf.int64, trainable=False)
            self._cursors = [tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(self.size)]
            self._counts = [tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(3)]
        self._rows: list[dict[str, float]] = []
        self.traced: Any = None
        self._write_plan()

    def counts(self) -> Counts:
        return Counts(*(int(variable.numpy()) for variable in self._counts))

    def scope(self) -> Any:
        return self.strategy.scope()

    # Training

    def fit(
        self,
        omni: OmniLearn,
        model: keras.Model,
        data: Any,
        epochs: int,
        *,
        validation_data: Any = None,
        callbacks: Sequence[Any] | None = None,
        shuffle: bool = True,
        initial_epoch: int | None = None,
        verbose: str | int = "auto",
    ) -> keras.callbacks.History:
        check(model, callbacks)
        arrays = _in_memory(data)
        with self.strategy.scope():
            build(model, tf.nest.map_structure(lambda part: part[:1], arrays))
        size = len(tf.nest.flatten(arrays)[0])
        if shuffle:
            order = np.random.default_rng(self._seed).permutation(size)
            arrays = tf.nest.map_structure(lambda part: part[order], arrays)
        step = self._step(model, arrays, size, shuffle)
        start = self.counts().samples
        calls = callback_list(True, model, callbacks, verbose, epochs, -(-size // self.global_batch))
        model.stop_training = False
        calls.on_train_begin()
        logs: dict[str, float] = {}
        for epoch in range(initial_epoch or 0, epochs):
            self._events.write("epoch", epoch=epoch, step=self.counts().updates, steps=None)
            calls.on_epoch_begin(epoch)
            done = self._run(step, start + (epoch + 1 - (initial_epoch or 0)) * size, calls)
            weight = sum(row["batch"] for row in done) or 1.0
            logs = {"loss": sum(row["loss"] * row["batch"] for row in done) / weight}
            if validation_data is not None:
                logs |= {f"val_{name}": value for name, value in self._evaluate(model, validation_data).items()}
            calls.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        self._write_updates()
        calls.on_train_end(logs)
        return model.history

    def _run(self, step: Any, until: int, calls: Any) -> list[dict[str, float]]:
        """Have steps done until so many samples were used in all. What every step told."""
        results: queue.Queue[Any] = queue.Queue(maxsize=self.size)  # who is far ahead of the chief waits
        stop = threading.Event()

        def keep_busy() -> None:
            try:
                while not stop.is_set():
                    results.put(self._coordinator.schedule(step).fetch())
            except BaseException as error:
                results.put(error)

        threads = [
            threading.Thread(target=keep_busy, name=f"omnilearn-step-{k}", daemon=True)
            for k in range(AHEAD * self.size)
        ]
        samples, done = self.counts().samples, []
        for thread in threads:
            thread.start()
        try:
            while samples < until or any(thread.is_alive() for thread in threads) or not results.empty():
                if samples >= until:
                    stop.set()
                with contextlib.suppress(queue.Empty):
                    row = self._told(results.get(timeout=0.1))
                    done.append(row)
                    samples += int(row["batch"])
                    calls.on_train_batch_end(len(done) - 1, {"loss": row["loss"]})
                    self._learn(row)
        except BaseException:
            stop.set()
            deadline = time.monotonic() + AT_END
            # They wait to be heard; the coordinator fails all steps once one has failed.
            while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    results.get(timeout=0.1)
            raise
        return done

    def _told(self, result: Any) -> dict[str, float]:
        if isinstance(result, tf.errors.UnavailableError):
            raise PeerFailure(
                f"a parameter server is gone, and the model with it ({str(result).splitlines()[0][:200]}): start again"
            ) from None
        if isinstance(result, BaseException):
            raise result
        row = dict(zip(FACTS, np.asarray(result).tolist(), strict=True))
        if not np.isfinite(row["loss"]):
            raise ArithmeticError(f"the loss of worker {row['worker']:.0f} is {row['loss']}: lower the learning rate")
        return row

    def _learn(self, row: dict[str, float]) -> None:
        """Tell the policy when every worker (that is alive) had its turn often enough."""
        self._rows.append(row)
        if len(self._rows) < self.size * max(2, self.state.interval):
            return
        busy, seen = np.zeros(self.size), np.zeros(self.size)
        batches = np.asarray(self.state.plan.batches)
        for told in self._rows:
            k = int(told["worker"])
            if int(told["batch"]) == batches[k]:  # not one begun under the plan before
                busy[k] += told["pull"] + told["compute"] + told["push"]
                seen[k] += 1
        self._write_updates()
        report = Report.of(batches, busy / np.maximum(seen, 1), measured=seen > 0)
        before = self.state.plan
        self.state = self._policy.update(self.problem, self.state, report)
        if self.state.plan.batches != before.batches:
            self._batches.assign(self.state.plan.batches)
            log.info("batches %s (%s)", self.state.plan.batches, self.state.plan.reason)
            self._write_plan()

    def _write_updates(self) -> None:
        if self._rows:
            self._events.write("updates", **{name: [round(told[name], 6) for told in self._rows] for name in FACTS})
        self._rows.clear()

    def _write_plan(self) -> None:
        plan = self.state.plan
        self._events.write(
            "plan", step=self.counts().updates, batches=plan.batches, parked=plan.parked, reason=plan.reason,
            predicted=plan.predicted, instead_of=plan.instead_of,
        )  # fmt: skip

    def _evaluate(self, model: keras.Model, data: Any) -> dict[str, float]:
        """By the chief, with the parameters as they are now: the workers rest."""
        arrays = _in_memory(data)
        size = len(tf.nest.flatten(arrays)[0])
        model.reset_metrics()
        for start in range(0, size, self.global_batch):
            part = tf.nest.map_structure(lambda a, s=start: tf.constant(a[s : s + self.global_batch]), arrays)
            loss_of(model, part, training=False)
        logs = plain(model.get_metrics_result())
        model.reset_metrics()
        return logs

    # One step, as a worker does it

    def _step(self, model: keras.Model, arrays: Any, size: int, shuffle: bool) -> Any:
        optimizer, usual = model.optimizer, self.global_batch / self.size
        variables, others = model.trainable_variables, model.non_trainable_variables
        updates, samples, discarded = self._counts

        def on_worker() -> Any:
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            begin = tf.timestamp()
            with tf.control_dependencies([begin]):
                batch = self._batches[worker]
                version = tf.identity(updates)
                values = [tf.identity(v.value) for v in (*variables, *others)]
            with tf.control_dependencies([batch, version, *values]):
                pulled = tf.timestamp()
            with tf.control_dependencies([pulled]):
                cursor = self._next(worker, batch)
                taken = self._take(arrays, size, worker, cursor, batch, shuffle)
                loss, gradients, news = self._gradient(model, values, taken)
            with tf.control_dependencies([loss, *gradients]):
                computed = tf.timestamp()
            with tf.control_dependencies([computed]):
                age = tf.identity(updates) - version
                factor = self._weight(age) * self._scale(tf.cast(batch, tf.float64) / usual)
                apply = factor > 0
                scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]

                def push() -> Any:
                    optimizer.apply(scaled, variables)
                    for variable, value in news:
                        variable.assign(value)
                    updates.assign_add(1)
                    return True

                if self._staleness == "discard":
                    pushed = tf.cond(apply, push, lambda: False)
                else:
                    pushed = tf.constant(push())
                samples.assign_add(batch)
                discarded.assign_add(tf.cast(~pushed, tf.int64))
            end = tf.timestamp()
            numbers = (worker, batch, pulled - begin, computed - pulled, end - computed, loss, age, pushed)
            return tf.stack([tf.cast(number, tf.float64) for number in numbers])

        self.traced = tf.function(lambda: self.strategy.run(on_worker), autograph=False)
        return self.traced

    def _next(self, worker: Any, batch: Any) -> Any:
        """This worker's position in its own order of the samples; nobody else moves it."""

        def move(cursor: Any) -> Any:
            start = tf.identity(cursor)
            with tf.control_dependencies([start]):
                cursor.assign_add(batch)
            return start

        return tf.switch_case(tf.cast(worker, tf.int32), [lambda c=cursor: move(c) for cursor in self._cursors])

    def _take(self, arrays: Any, size: int, worker: Any, cursor: Any, batch: Any, shuffle: bool) -> Any:
        """The next samples of this worker. Each pass of each worker walks through the shuffled data by a stride of its
        own, which meets every sample once."""
        places = cursor + tf.range(batch)
        at = places % size
        if shuffle:
            strides, offsets = _walks(size, self._seed)
            walk = (places // size * self.size + worker) % len(strides)
            at = (at * tf.gather(strides, walk) + tf.gather(offsets, walk)) % size
        return tf.nest.map_structure(lambda part: tf.gather(tf.constant(part), at), arrays)

    def _gradient(self, model: keras.Model, values: list[Any], batch: Any) -> Any:
        """Loss and gradient at the values that were pulled, and what the model's other variables become."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        everything = [*model.trainable_variables, *model.non_trainable_variables]
        trainable = values[: len(model.trainable_variables)]
        with tf.GradientTape() as tape:
            tape.watch(trainable)
            with keras.StatelessScope(zip(everything, values, strict=True)) as scope:
                predicted = model(x, training=True)
                loss = model.compute_loss(x, y, predicted, weight, training=True)
        news = [
            (variable, new)
            for variable, old in zip(model.non_trainable_variables, values[len(trainable) :], strict=True)
            if (new := scope.get_current_value(variable)) is not None and new is not old
        ]
        gradients = tape.gradient(loss, trainable, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return loss, [tf.convert_to_tensor(gradient) for gradient in gradients], news

    def _weight(self, age: Any) -> Any:
        """What ``judge_staleness`` says, in a graph."""
        age = tf.cast(age, tf.float64)
        if self._staleness == "scale":
            return 1 / (1 + age)
        return tf.cast(age <= THRESHOLD, tf.float64) if self._staleness == "discard" else tf.ones_like(age)

    def _scale(self, ratio: Any) -> Any:
        """What ``lr_factor`` says, in a graph."""
        one = tf.ones_like(ratio)
        return {
            "capped": lambda: tf.minimum(ratio, one), "linear": lambda: ratio, "sqrt": lambda: tf.sqrt(ratio),
            "none": lambda: one,
        }[self._lr_scaling]()  # fmt: skip


def _walks(size: int, seed: int) -> tuple[Any, Any]:
    """Strides that have no divisor in common with ``size``, and where to begin."""
    draw = np.random.default_rng(seed)
    strides = [n for n in draw.integers(1, max(size, 2), 8 * WALKS).tolist() if math.gcd(n, size) == 1][:WALKS] or [1]
    return np.asarray(strides, dtype=np.int64), draw.integers(0, size, len(strides), dtype=np.int64)


def _in_memory(data: Any) -> Any:
    """The data as arrays: they go to each worker once, with the step."""
    samples, _ = open_samples(data, False, 0)
    whole = samples.fetch(np.arange(samples.size), 0)
    return tf.nest.map_structure(np.asarray, whole)
