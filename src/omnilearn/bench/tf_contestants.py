"""The ways of training with TensorFlow that benchmarks compare: a loop by hand with any fixed split, and OmniLearn.

The loop by hand is what one would write without OmniLearn: one tf.function, one flat reduction over the workers of the
split by the same collective, gradients weighted where batches are unequal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from omnilearn.bench.block import Block
from omnilearn.bench.tf_workloads import Workload
from omnilearn.control import Policy
from omnilearn.tensorflow import OmniLearn
from omnilearn.tensorflow.collectives import Group, reduce_sum
from omnilearn.tensorflow.world import World

TIMEOUT = 120.0
"""Seconds after which a peer that does not answer ends the benchmark."""


@dataclass
class Job:
    """What is trained and by whom: the same for all contestants of a session."""

    workload: Workload
    x: Any
    y: Any
    world: World
    watch: bool

    def data(self, samples: int) -> tuple[Any, Any]:
        """So many samples, out of those that are held."""
        at = np.arange(samples) % len(self.x)
        return self.x[at], self.y[at]

    def start(self, seed: int = 0) -> tuple[Any, Any, Callable[[Any], Any]]:
        """A fresh model and optimizer, the same whenever this is called, and the loss of a batch."""
        keras.utils.set_random_seed(seed)
        model, optimizer = self.workload.model(), self.workload.optimizer()
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def compute_loss(batch: Any) -> Any:
            return cross_entropy(batch[1], model(batch[0], training=True))

        return model, optimizer, compute_loss

    def signature(self) -> list[Any]:
        return [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in (self.x, self.y)]


class Plain:
    """A fixed split over some of the workers, by hand. The other workers do nothing."""

    def __init__(self, job: Job, *, seed: int = 0) -> None:
        self._job, self._seed = job, seed
        self.model, self._optimizer, self._loss = job.start(seed)
        self._optimizer.build(self.model.trainable_variables)
        self._groups: dict[tuple[int, ...], Group] = {}
        number, whole = tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int32)
        self._together = tf.function(self._reduced, input_signature=[*job.signature(), number, whole, whole, whole])
        self._alone = tf.function(self._local, input_signature=job.signature())
        self._epoch = self._step = 0
        self._progress = _progress()

    def _gradient(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self._loss((x, y))
        return loss, tape.gradient(loss, [v.value for v in self.model.trainable_variables])

    def _local(self, x: Any, y: Any) -> Any:
        loss, gradients = self._gradient(x, y)
        with tf.control_dependencies(gradients):
            ready = tf.timestamp()
        self._optimizer.apply(gradients, self.model.trainable_variables)
        return loss, ready, ready

    def _reduced(self, x: Any, y: Any, factor: Any, size: Any, group: Any, instance: Any) -> Any:
        loss, gradients = self._gradient(x, y)
        flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients] + [loss[None]], axis=0) * factor
        with tf.control_dependencies([flat]):
            ready = tf.timestamp()
        with tf.control_dependencies([ready]):
            flat = reduce_sum(flat, TIMEOUT, size, group, instance)
        with tf.control_dependencies([flat]):
            end = tf.timestamp()
        *parts, loss = tf.split(flat, [*(int(np.prod(g.shape)) for g in gradients), 1])
        gradients = [tf.reshape(part, g.shape) for part, g in zip(parts, gradients, strict=True)]
        self._optimizer.apply(gradients, self.model.trainable_variables)
        return loss, ready, end

    def block(self, steps: int, batches: tuple[int, ...]) -> Block:
        job, rank, step, last = self._job, self._job.world.rank, self._step, None
        self._step, self._epoch = self._step + steps, self._epoch + 1
        active = tuple(k for k, size in enumerate(batches) if size)
        if active not in self._groups:
            self._groups[active] = Group(active, TIMEOUT)  # by all ranks: keys are counted
        if not batches[rank]:
            return Block(end=time.perf_counter())
        total, first = sum(batches), sum(batches[:rank])
        order = np.random.default_rng(self._seed + self._epoch).permutation(steps * total) % len(job.x)
        group, block, loss = self._groups[active], Block(), None
        for number in range(steps):
            start = number * total + first
            at = order[start : start + batches[rank]]
            x, y = tf.convert_to_tensor(job.x[at]), tf.convert_to_tensor(job.y[at])
            if len(active) == 1:
                loss, ready, end = self._alone(x, y)
            else:
                factor = batches[rank] / total
                loss, ready, end = self._together(x, y, factor, len(active), group.key, group.instance("gradient"))
            if job.watch:
                if last is not None:
                    block.busy[step], block.wait[step] = float(ready) - last, max(float(end) - float(ready), 0.0)
                last = float(end)
            block.ends[step], block.samples[step] = time.perf_counter(), len(at)
            step += 1
            self._progress(step)
        return _finish(block, loss)


class Omni:
    """OmniLearn as a user has it. A block is an epoch of ``steps`` steps, the same number each time."""

    def __init__(
        self, job: Job, steps: int, policy: str | Policy = "optimal", *, seed: int = 0, **options: Any
    ) -> None:
        self._job = job
        self.omni = OmniLearn(job.workload.global_batch, policy=policy, seed=seed, timeout=TIMEOUT, **options)
        model, optimizer, self._loss = job.start(seed)
        self.model, _ = self.omni.prepare(model, optimizer)
        self._dataset = self.omni.dataset(job.data(steps * job.workload.global_batch), shuffle=True)
        self.reasons: list[tuple[int, tuple[int, ...], str]] = []
        self.omni.on_plan(lambda plan, step: self.reasons.append((step, plan.batches, plan.reason)))

    def block(self) -> Block:
        block, loss, clock = Block(), None, self.omni._prepared("block").clock
        for x, y in self._dataset:
            step = self._dataset.sampler.step
            loss = self.omni.step(self._loss, (x, y))
            if self._job.watch and clock.latest is not None:
                block.busy[step], block.wait[step] = clock.latest.busy, clock.latest.wait
            block.ends[step], block.samples[step] = time.perf_counter(), int(x.shape[0])
        return _finish(block, loss)

    def close(self) -> None:
        self.omni.close()


def _finish(block: Block, loss: Any) -> Block:
    block.end = time.perf_counter()
    block.loss = None if loss is None else float(np.ravel(loss)[0])
    return block


def _progress() -> Callable[[int], None]:
    """Tells the emulation how far the training is, as OmniLearn's engine does."""
    from omnilearn.engine.progress import Progress

    return Progress().write if os.environ.get("OMNILEARN_PROGRESS") else lambda step: None


def local_steps(job: Job, sizes: list[int], repeats: int, seconds: float) -> Iterator[tuple[int, float]]:
    """This worker alone: seconds per step at each batch size, reductions left out.

    Every size is repeated for at least so long, so that workers timed side by side compute at the same time.
    """
    alone = Plain(job)
    for size in sizes:
        at = np.arange(size) % len(job.x)
        x, y = tf.convert_to_tensor(job.x[at]), tf.convert_to_tensor(job.y[at])
        begin, count = time.perf_counter(), 0
        while count < repeats + 1 or time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            alone._alone(x, y)
            if count:
                yield size, time.perf_counter() - start
            count += 1
