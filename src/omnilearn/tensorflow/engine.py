"""The synchronous engine: a step is done together, by whoever takes part, with exact gradients.

One tf.function computes a worker's gradient, scales it by the worker's part of the step, adds up one flat vector over
the group (the loss goes along), and applies the optimizer; model and optimizer are plain Keras objects. The gradient is
``Σ w_k·g_k / Σ w_k``, w_k being the samples (or the user's weight) really in worker k's batch. Batch sizes, group and
weights are inputs of that function: it is traced once whatever they are.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from omnilearn.control import Plan, Policy, Problem
from omnilearn.engine.loop import SyncLoop, Workers
from omnilearn.engine.planner import Planner, Timing
from omnilearn.engine.source import Piece, Source
from omnilearn.errors import OmniLearnError, UsageError
from omnilearn.observe import EventLog
from omnilearn.tensorflow.collectives import Group, reduce_sum
from omnilearn.tensorflow.world import World

log = logging.getLogger("omnilearn")

MOST_FUNCTIONS = 8
"""More functions than this to compute a loss are taken for one that is made anew in every step."""
MOST_TRACES = 8
"""So many traces of one function are kept, where numbers that it reads change."""


class NonFiniteError(OmniLearnError, ArithmeticError):
    """The gradient of a step is not finite. Raised on all ranks alike."""


class Clock:
    """Busy: from the end of one reduction to this worker's next gradient. Wait: from there to the end of the next."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._steps: deque[Timing | None] = deque()
        self.latest: Timing | None = None

    def restart(self) -> None:
        self._last = None

    def add(self, ready: float, end: float) -> None:
        last, self._last = self._last, end
        self.latest = None if last is None else Timing(max(ready - last, 1e-9), max(end - ready, 0.0))
        self._steps.append(self.latest)

    def take(self) -> Timing | None:
        return self._steps.popleft() if self._steps else None

    def clear(self) -> None:
        self._steps.clear()


class _Traced(NamedTuple):
    """A step in TensorFlow's hands; ``length``: of the flat gradient that it reduces. ``kept``: what identifies it
    stays alive, so that its number is given to nothing else."""

    function: Any
    length: int
    kept: Any


class SyncEngine(SyncLoop):
    """Drives the loop from inside ``dataset`` and ``step``."""

    world: World

    def __init__(
        self,
        world: World,
        policy: Policy,
        problem: Problem,
        model: Any,
        optimizer: Any,
        *,
        nonfinite: str,
        micro_batch: int | None,
        on_plan: Callable[[Plan, int], None],
        events: EventLog,
    ) -> None:
        self.clock = Clock()
        super().__init__(world, Planner(world, self.clock, policy, problem, on_plan, events), events)
        self.model, self.optimizer = model, optimizer
        self.nonfinite, self.micro_batch, self.skipped = nonfinite, micro_batch, 0
        self.updates = self.samples = 0
        optimizer.build(model.trainable_variables)
        self._known = list(model.trainable_variables)
        self._weights = list(model.weights)
        self._trained = tuple(bool(weight.trainable) for weight in self._weights)
        self._warned = False
        self.piece: Piece | None = None
        # Not their paths: Keras numbers layers by how many were made before.
        world.agree("models", {f"variable {k} ({v.name})": (*v.shape, v.dtype) for k, v in enumerate(self.variables)})
        self._groups: dict[Workers, Group] = {}
        self._functions: dict[Any, _Traced] = {}
        if world.control is not None:
            self.send(world.control, source=0)

    # State

    @property
    def variables(self) -> list[Any]:
        """What makes up the state of training: the model's weights and the optimizer's."""
        return [*self.model.weights, *self.optimizer.variables]

    def send(self, group: Group, source: int) -> None:
        """The training state of the group's one source, to all others in it."""
        sends = self.rank == source
        arrays = [np.asarray(v.numpy()) for v in self.variables]
        with self.world.naming_the_culprit("sending the training state"):
            data = group.broadcast(
                b"".join(a.tobytes() for a in arrays) if sends else None, sum(a.nbytes for a in arrays), source
            )
        if sends:
            return
        start = 0
        for variable, array in zip(self.variables, arrays, strict=True):
            part = np.frombuffer(data, dtype=array.dtype, count=array.size, offset=start)
            variable.assign(part.reshape(array.shape))
            start += array.nbytes

    def hand_over(self, source: int, targets: Sequence[int]) -> None:
        group = self.group(tuple(sorted({source, *targets})))
        if targets and self.rank in group.workers:
            self.send(group, source)

    def share_buffers(self) -> None:
        buffers = [v for v in self.model.non_trainable_weights if "float" in str(v.dtype)]
        if len(self.active) < 2 or not buffers or not self.takes_part:
            return
        arrays = [np.asarray(v.numpy(), dtype=np.float64) for v in buffers]
        with self.world.naming_the_culprit("averaging buffers"):
            total = self.group(self.active).sum(np.concatenate([a.reshape(-1) for a in arrays])) / len(self.active)
        start = 0
        for variable, array in zip(buffers, arrays, strict=True):
            variable.assign(total[start : start + array.size].reshape(array.shape))
            start += array.size

    def restart_clock(self) -> None:
        self.clock.restart()

    # Groups

    def form(self, workers: Workers) -> None:
        self.group(workers)

    def group(self, workers: Workers) -> Group:
        """The group of these workers. All ranks ask for the same ones in the same order: their keys are counted."""
        if workers == self.everybody and self.world.control is not None:
            return self.world.control
        if workers not in self._groups:
            self._groups[workers] = Group(workers, self.world.timeout)
        return self._groups[workers]

    # A step

    def hand_out(self, piece: Piece) -> None:
        self.piece = piece
        self.begin_share(piece.share)

    def take_back(self, source: Source, piece: Piece) -> None:
        if not self.done:
            raise UsageError(
                f"omni.step(…) was not called for the last batch (step {piece.share.step}): every batch needs it "
                f"exactly once, or the other workers wait for this one's gradient"
            )
        self.end_share(source, piece.share)

    def take_step(self, compute_loss: Callable[[Any], Any], batch: Any, weight: float | None) -> Any:
        """Gradient, reduction and update. Returns the loss of the whole global batch."""
        share = self.share
        if share is None:
            raise UsageError("step() belongs inside the loop over omni.dataset(…): there is no batch under way")
        if self.done:
            raise UsageError(f"step() was called twice for one batch (step {share.step}): every batch needs it once")
        if weight is not None and self.micro_batch:
            raise UsageError(
                "step(weight=…) with OmniLearn(micro_batch=…): weights within a batch are not known: use one"
            )
        alone, samples = len(self.active) < 2, share.sizes[self.rank]
        batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
        traced = self._function(compute_loss, batch, weight is not None, alone)
        function = traced.function
        part, keys = float(samples if weight is None or not samples else weight) / share.total, (0, 0, 0)
        if not alone:
            group = self.group(self.active)
            keys = (len(group), group.key, group.instance("gradient", traced.length))
        # Samples that were only lent leave nothing behind.
        lent = self.piece is not None and self.piece.lent
        kept = [(v, v.numpy()) for v in self.model.non_trainable_weights] if lent else []
        with self.world.naming_the_culprit("reducing gradients"):
            loss, facts = function(batch, tf.constant(part, tf.float64), tf.constant(keys, tf.int32))
            ready, end, finite, own = facts.numpy().tolist()
        for variable, before in kept:
            variable.assign(before)
        self.clock.add(ready, end)
        self.done, self.loss = True, own
        self.samples += share.total
        if finite:
            self.updates += 1
        else:
            self._not_finite(share.step, own)
        assert self.source is not None
        self.source.sampler.consumed(share)  # a checkpoint saved now goes on behind this step
        return loss

    def _not_finite(self, step: int, loss: float) -> None:
        """Raise, or count the step that was left out. The gradient is the reduced one: all ranks come here."""
        losses = self.world.gather(loss, self.group(self.active)) if len(self.active) > 1 else [loss]
        told = ", ".join(f"rank {rank}: {loss:g}" for rank, loss in zip(self.active, losses, strict=True))
        if self.nonfinite == "raise":
            raise NonFiniteError(
                f"the gradient of step {step} is not finite (losses: {told}): lower the learning rate, clip gradients, "
                f"or leave such steps out with OmniLearn(nonfinite='skip')"
            )
        self.skipped += 1
        log.warning("step %d left out: its gradient is not finite (losses: %s)", step, told)

    def _function(self, compute_loss: Callable[[Any], Any], batch: Any, weighted: bool, alone: bool) -> Any:
        """The traced step for this way of computing a loss."""
        parts = tuple((part.dtype, *part.shape[1:]) for part in tf.nest.flatten(batch))
        identity, held = _identity(compute_loss)
        key = (identity, type(batch), parts, weighted, alone, self._trainable())
        if key not in self._functions:
            self._make_room(identity)
            spec = tf.nest.map_structure(any_size, batch)
            lengths: list[int] = []

            def step(batch: Any, part: Any, keys: Any) -> Any:
                return self._step(compute_loss, batch, part, weighted, None if alone else tf.unstack(keys, 3), lengths)

            signature = [spec, tf.TensorSpec([], tf.float64), tf.TensorSpec([3], tf.int32)]
            # Concrete, because to look for the right trace takes TensorFlow about half a millisecond per call.
            traced = tf.function(step, input_signature=signature).get_concrete_function()
            self._functions[key] = _Traced(traced, lengths[0] if lengths else 0, [compute_loss, held])
        return self._functions[key]

    def _make_room(self, identity: tuple[Any, ...]) -> None:
        """A few functions are kept, and a few traces of each. Raises where one is defined anew in every step."""
        if len({known[0] for known, *_ in self._functions} | {identity[0]}) > MOST_FUNCTIONS:
            raise UsageError(
                f"step() has seen {MOST_FUNCTIONS} different functions to compute a loss, each of which TensorFlow "
                f"must trace: define it once, before the loop"
            )
        same = [key for key in self._functions if key[0][0] == identity[0] and key[0] != identity]
        if len(same) >= MOST_TRACES:
            if not self._warned:
                self._warned = True
                log.warning("TensorFlow has traced the function that computes the loss %d times, as a number that it "
                            "reads keeps changing: a tf.Variable that is assigned to costs no trace",
                            len(same))  # fmt: skip
            del self._functions[same[0]]

    def _trainable(self) -> tuple[bool, ...]:
        """Which weights train now: a layer that is frozen or unfrozen is another step."""
        trainable = tuple(bool(weight.trainable) for weight in self._weights)
        if trainable != self._trained:
            known = {id(v) for v in self._known}
            strangers = [v.path for v in self.model.trainable_variables if id(v) not in known]
            if strangers:
                raise UsageError(
                    f"{strangers[0]} is trainable now and was not when prepare() was called: Keras gives an optimizer "
                    f"its variables once: make it trainable before prepare(), and freeze it afterwards"
                )
            self._trained = trainable
        return trainable

    def _step(self, compute: Any, batch: Any, part: Any, weighted: bool, reduce: Any, lengths: list[int]) -> Any:
        variables, gradients, own = self._gradient(compute, batch)
        with tf.control_dependencies([*gradients, own]):
            ready = end = tf.timestamp()
        loss = own
        if reduce is not None:
            kind = _widest([gradient.dtype for gradient in gradients])
            parts = [tf.cast(tf.reshape(value, [-1]), kind) for value in (*gradients, own, 1.0)]
            flat = tf.concat(parts, axis=0) * tf.cast(part, kind)
            lengths.append(int(flat.shape[0]))
            with tf.control_dependencies([flat]):
                ready = tf.timestamp()
            with tf.control_dependencies([ready]):
                flat = reduce_sum(flat, self.world.timeout, *reduce)
            with tf.control_dependencies([flat]):
                end = tf.timestamp()
            if weighted:  # their sum was not known before; it came along
                flat = flat / flat[-1]
            *parts, loss, _ = tf.split(flat, [*(int(np.prod(v.shape)) for v in variables), 1, 1])
            gradients = [
                tf.cast(tf.reshape(value, v.shape), v.dtype) for value, v in zip(parts, variables, strict=True)
            ]
        finite = _finite([loss, *self._looked_at(gradients)])
        scaler = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)  # it leaves such steps out by itself
        if self.nonfinite == "skip" and not scaler:
            tf.cond(finite, lambda: self.optimizer.apply(gradients, variables), lambda: None)
        else:  # where a bad step ends the run anyway, a branch in every step would cost some percent
            self.optimizer.apply(gradients, variables)
        finite = tf.constant(True) if scaler else finite
        facts = tf.stack([ready, end, tf.cast(finite, tf.float64), tf.cast(own, tf.float64)])
        return tf.squeeze(loss), facts

    def _looked_at(self, gradients: list[Any]) -> list[Any]:
        """Where a bad step ends the run, the smaller half of the gradient's tensors: a loss that is not finite shows in
        all of them, and a single layer that overflows does so one step later, through its weights."""
        if self.nonfinite == "skip":
            return gradients
        return sorted(gradients, key=lambda gradient: int(np.prod(gradient.shape)))[: (len(gradients) + 1) // 2]

    def _gradient(self, compute: Any, batch: Any) -> tuple[list[Any], list[Any], Any]:
        """The variables the loss depends on, its gradient, and the loss: the mean over this worker's batch."""
        size = self.micro_batch
        if not size:
            return self._pass(compute, batch)
        count = tf.shape(tf.nest.flatten(batch)[0])[0]

        def part(start: Any) -> Any:
            return tf.nest.map_structure(lambda t: t[start : start + size], batch)

        def weigh(start: Any, values: list[Any]) -> list[Any]:
            n = tf.minimum(size, count - start)
            return [value * tf.cast(n, value.dtype) for value in values]

        variables, gradients, loss = self._pass(compute, part(0))

        def more(start: Any, *sums: Any) -> Any:
            _, gradients, loss = self._pass(compute, part(start))
            return start + size, *(a + b for a, b in zip(sums, weigh(start, [*gradients, loss]), strict=True))

        _, *sums = tf.while_loop(
            lambda start, *_: start < count,
            more,
            (tf.constant(size), *weigh(tf.constant(0), [*gradients, loss])),
            parallel_iterations=1,
        )
        *gradients, loss = [value / tf.cast(count, value.dtype) for value in sums]
        return variables, gradients, loss

    def _pass(self, compute: Any, batch: Any) -> tuple[list[Any], list[Any], Any]:
        with tf.GradientTape() as tape:
            loss = tf.convert_to_tensor(compute(batch))
            if loss.shape.rank:
                raise UsageError(
                    f"compute_loss must give the mean loss of the batch, one number, got shape {loss.shape}"
                )
            scaled = self.optimizer.scale_loss(loss)
        pairs = zip(tape.gradient(scaled, _values(self.model)), self.model.trainable_variables, strict=True)
        used = [(tf.convert_to_tensor(gradient), variable) for gradient, variable in pairs if gradient is not None]
        if not used:
            raise UsageError("the loss does not depend on any trainable variable of the model given to prepare()")
        return [variable for _, variable in used], [gradient for gradient, _ in used], loss


def _finite(values: list[Any]) -> Any:
    """Whether all is finite. Any number that is not makes a sum so; a sum may also overflow by itself."""
    sums = tf.add_n([tf.cast(tf.reduce_sum(value), tf.float64) for value in values])

    def exactly() -> Any:
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])

    return tf.cond(tf.math.is_finite(sums), lambda: True, exactly)


def _values(model: Any) -> list[Any]:
    return [variable.value for variable in model.trainable_variables]


def _widest(dtypes: Sequence[Any]) -> Any:
    """The type to add gradients up in: the widest of them, at least float32."""
    return max([tf.float32, *dtypes], key=lambda dtype: dtype.size)


def any_size(part: Any) -> Any:
    """What a traced step accepts in this place: any batch size."""
    part = part if isinstance(part, tf.Tensor) else np.asarray(part)
    if not len(part.shape):
        raise UsageError("step() got a batch with a number in it: all its parts must have a first dimension of samples")
    return tf.TensorSpec([None, *part.shape[1:]], part.dtype)


def _identity(function: Any) -> tuple[Any, list[Any]]:
    """The same for a function made anew in every step, as long as it would do the same; and what must be kept, so that
    no number in it is given to something else. Numbers and words that it reads count by value: tracing writes them into
    the graph."""
    inner, owner = getattr(function, "__func__", function), getattr(function, "__self__", None)
    if not hasattr(inner, "__code__"):
        return id(function), [function]
    read = [_content(cell) for cell in inner.__closure__ or ()]
    read += [inner.__globals__[name] for name in _names(inner.__code__) if name in inner.__globals__]
    read += [inner.__defaults__, inner.__kwdefaults__]
    return (id(inner.__code__), id(owner), *map(_mark, read)), [owner, read]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


@lru_cache(maxsize=256)
def _names(code: Any) -> tuple[str, ...]:
    """Global names that this code, or a function in it, reads."""
    inside = [part for part in code.co_consts if isinstance(part, CodeType)]
    return (*code.co_names, *(name for part in inside for name in _names(part)))


def _mark(value: Any) -> Any:
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None), np.generic)):
        return type(value), repr(value)
    if isinstance(value, tuple):
        return tuple(map(_mark, value))
    if isinstance(value, dict) and len(value) < 20 and all(isinstance(key, str) for key in value):
        return tuple((key, _mark(item)) for key, item in value.items())
    return id(value)


def smallest_batch(model: Any) -> int:
    """The least batch the model should train on: 2 where BatchNorm takes a variance over it."""
    return 2 if any(isinstance(layer, keras.layers.BatchNormalization) for layer in _layers(model)) else 1


def _layers(model: Any) -> list[Any]:
    return list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else []
