"""One asynchronous step, as a worker does it: pull the model, compute a gradient on samples of its own, push it.

The step asks which worker it runs on and takes that worker's batch size from a variable, so that batches change without
tracing anything again. Pull, compute and push are timed apart. What is counted is counted on the parameter servers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from omnilearn.tensorflow.fit import loss_of

WALKS = 256
"""Different orders of the samples, after which they come again."""


@dataclass
class Counts:
    """What was done: updates applied, samples used, gradients discarded because of their age."""

    updates: int
    samples: int
    discarded: int


class Told(NamedTuple):
    """What a step tells the chief; times in seconds. ``weight``: by its staleness (0: discarded)."""

    worker: int
    batch: int
    pull: float
    compute: float
    push: float
    loss: float
    staleness: int
    weight: float
    finite: bool

    @property
    def seconds(self) -> float:
        return self.pull + self.compute + self.push

    @property
    def applied(self) -> bool:
        return self.weight > 0 and self.finite


def told(numbers: Any) -> Told:
    worker, batch, pull, compute, push, loss, staleness, weight, finite = np.asarray(numbers).tolist()
    return Told(int(worker), int(batch), pull, compute, push, loss, int(staleness), weight, bool(finite))


@dataclass(frozen=True)
class Rules:
    """What becomes of a gradient: of one computed long ago, and of one from a small or large batch."""

    staleness: str
    threshold: int
    lr_scaling: str
    usual_batch: float

    def weight(self, age: Any) -> Any:
        """What ``judge_staleness`` says, in a graph."""
        age = tf.cast(age, tf.float64)
        if self.staleness == "scale":
            return 1 / (1 + age)
        return tf.cast(age <= self.threshold, tf.float64) if self.staleness == "discard" else tf.ones_like(age)

    def scale(self, batch: Any) -> Any:
        """What ``lr_factor`` says, in a graph."""
        ratio = tf.cast(batch, tf.float64) / self.usual_batch
        rules = {"linear": ratio, "capped": tf.minimum(ratio, 1.0), "sqrt": tf.sqrt(ratio), "none": tf.ones_like(ratio)}
        return rules[self.lr_scaling]


class Shared:
    """Variables on the parameter servers: everybody's batch and position in the data, and the counts."""

    def __init__(self, batches: tuple[int, ...]) -> None:
        self.batches = tf.Variable(batches, dtype=tf.int64, trainable=False)
        self.cursors = [tf.Variable(0, dtype=tf.int64, trainable=False) for _ in batches]
        self._counts = [tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(3)]
        self.updates, self.samples, self.discarded = self._counts

    def counts(self) -> Counts:
        return Counts(*(int(variable.numpy()) for variable in self._counts))

    def state_dict(self) -> dict[str, Any]:
        return {"counts": asdict(self.counts()), "cursors": [int(cursor.numpy()) for cursor in self.cursors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for variable, value in zip(self._counts, astuple(Counts(**state["counts"])), strict=True):
            variable.assign(value)
        positions = state["cursors"]
        if len(positions) != len(self.cursors):  # another number of workers: behind all that was used
            positions = [max(positions)] * len(self.cursors)
        for cursor, position in zip(self.cursors, positions, strict=True):
            cursor.assign(position)

    def move(self, worker: Any, batch: Any) -> Any:
        """This worker's position in its own order of the samples, moved on; nobody else moves it."""

        def moved(cursor: Any) -> Any:
            start = tf.identity(cursor)
            with tf.control_dependencies([start]):
                cursor.assign_add(batch)
            return start

        return tf.switch_case(tf.cast(worker, tf.int32), [lambda c=cursor: moved(c) for cursor in self.cursors])


class Walk:
    """The data in each worker's own order. Each pass of each worker walks through it by a stride of its own, which
    meets every sample once."""

    def __init__(self, arrays: Any, workers: int, shuffle: bool, seed: int) -> None:
        self.size, self._workers, self._shuffle = len(tf.nest.flatten(arrays)[0]), workers, shuffle
        draw = np.random.default_rng(seed)
        order = draw.permutation(self.size) if shuffle else np.arange(self.size)
        self._arrays = tf.nest.map_structure(lambda part: part[order], arrays)
        steps = draw.integers(1, max(self.size, 2), 8 * WALKS).tolist()
        self._strides = np.asarray([n for n in steps if math.gcd(n, self.size) == 1][:WALKS] or [1], dtype=np.int64)
        self._offsets = draw.integers(0, self.size, len(self._strides), dtype=np.int64)

    def take(self, worker: Any, cursor: Any, batch: Any) -> Any:
        places = cursor + tf.range(batch)
        at = places % self.size
        if self._shuffle:
            walk = (places // self.size * self._workers + worker) % len(self._strides)
            at = (at * tf.gather(self._strides, walk) + tf.gather(self._offsets, walk)) % self.size
        return tf.nest.map_structure(lambda part: tf.gather(tf.constant(part), at), self._arrays)


def on_worker(model: keras.Model, shared: Shared, walk: Walk, rules: Rules) -> Any:
    """The body of the step: traced once, run by whichever worker is free. Gives the numbers of ``Told``."""
    optimizer, variables = model.optimizer, model.trainable_variables
    scaler = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)  # it leaves steps out by itself
    worker = tf.distribute.coordinator.experimental_get_current_worker_index()
    begin = tf.timestamp()
    with tf.control_dependencies([begin]):
        batch = shared.batches[worker]
        version = tf.identity(shared.updates)
        values = [tf.identity(v.value) for v in (*variables, *model.non_trainable_variables)]
    with tf.control_dependencies([batch, version, *values]):
        pulled = tf.timestamp()
    with tf.control_dependencies([pulled]):
        samples = walk.take(worker, shared.move(worker, batch), batch)
        loss, gradients, news, counted = _gradient(model, values, samples)
    with tf.control_dependencies([loss, *gradients]):
        computed = tf.timestamp()
    with tf.control_dependencies([computed]):
        age = tf.identity(shared.updates) - version
        weight = rules.weight(age)
        finite = (
            tf.constant(True) if scaler else tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
        )

        def push() -> Any:
            with learning_rate_times(optimizer, weight * rules.scale(batch)):
                optimizer.apply(gradients, variables)
            for variable, value in news:
                variable.assign(value)
            shared.updates.assign_add(1)
            return tf.constant(True)

        def decide(strategy: Any) -> Any:
            apply = (weight > 0) & finite
            return tf.cond(apply, lambda: strategy.extended.call_for_each_replica(push), lambda: False)

        # Not from here: the strategy has the optimizer's apply inside of a condition only where replicas are merged.
        pushed = tf.distribute.get_replica_context().merge_call(decide)
        for variable, more in counted:
            variable.value.assign_add(more)  # not Keras' own, which loses counts when workers race
        shared.samples.assign_add(batch)
        shared.discarded.assign_add(tf.cast(weight <= 0, tf.int64))
    with tf.control_dependencies([pushed]):
        end = tf.timestamp()
    numbers = (worker, batch, pulled - begin, computed - pulled, end - computed, loss, age, weight, finite)
    return tf.stack([tf.cast(number, tf.float64) for number in numbers])


@contextlib.contextmanager
def learning_rate_times(optimizer: Any, factor: Any) -> Iterator[None]:
    """While a step is traced. Keras has one learning rate for all workers; its variable must not be touched."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    rate, name = inner._get_current_learning_rate, "_get_current_learning_rate"
    object.__setattr__(inner, name, lambda: rate() * tf.cast(factor, tf.float32))  # not one of Keras' tracked things
    try:
        yield
    finally:
        object.__delattr__(inner, name)


def _gradient(model: keras.Model, values: list[Any], batch: Any) -> Any:
    """Loss and gradient at the values that were pulled; what the model's other variables become, and what the metrics
    gain. Nothing is changed yet."""
    trainable, others = model.trainable_variables, model.non_trainable_variables
    counters = [variable for metric in model.metrics for variable in metric.variables]
    begin = [tf.zeros(variable.shape, variable.dtype) for variable in counters]
    mapping = list(zip([*trainable, *others, *counters], [*values, *begin], strict=True))
    with tf.GradientTape() as tape:
        tape.watch(values[: len(trainable)])
        with keras.StatelessScope(mapping) as scope:
            loss = loss_of(model, batch, training=True)
        scaled = model.optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, values[: len(trainable)], unconnected_gradients=tf.UnconnectedGradients.ZERO)

    def changed(variables: list[Any], before: list[Any]) -> list[tuple[Any, Any]]:
        after = [scope.get_current_value(variable) for variable in variables]
        return [(v, new) for v, new, old in zip(variables, after, before, strict=True) if new is not old]

    news, counted = changed(others, values[len(trainable) :]), changed(counters, begin)
    return loss, [tf.convert_to_tensor(gradient) for gradient in gradients], news, counted
