"""``fit`` and ``evaluate`` for compiled Keras models: Keras' losses, metrics and callbacks around OmniLearn's steps.

Metrics are kept by each worker for its own samples. Their variables are sums, so that at the end of an epoch the sum
over the workers is the metric over all samples; every rank then has the same logs and its callbacks decide alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from omnilearn.errors import UsageError
from omnilearn.tensorflow.dataset import open_samples
from omnilearn.tensorflow.engine import any_size

if TYPE_CHECKING:
    from omnilearn.tensorflow.omni import OmniLearn

WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
)
"""Callbacks that write files, or speak to others: on rank 0 alone."""
MEANS = ("sum_over_batch_size", "mean", None)


class Trainer:
    """Trains and evaluates one compiled model, on all workers together."""

    def __init__(self, omni: OmniLearn, model: keras.Model) -> None:
        self._omni, self.model = omni, model

    def fit(
        self,
        data: Any,
        epochs: int,
        validation_data: Any,
        callbacks: Sequence[Any] | None,
        *,
        shuffle: bool,
        initial_epoch: int | None,
        verbose: str | int,
    ) -> keras.callbacks.History:
        omni, model = self._omni, self.model
        with omni._world.alike():
            check(model, callbacks)
            samples, _ = open_samples(data, False, 0)
        build(model, samples.fetch(np.arange(1), 0))
        omni._prepare_for_fit(model)
        start = initial_epoch if initial_epoch is not None else omni._resumed if omni._restored else 0
        dataset = omni.dataset(data, shuffle=shuffle)
        calls = callback_list(omni.is_main, model, callbacks, verbose, epochs, len(dataset))
        results = tf.function(model.get_metrics_result)

        def train(epoch: int) -> dict[str, float]:
            model.reset_metrics()
            for number, batch in enumerate(dataset):
                calls.on_train_batch_begin(number)
                # Samples that were only lent do not count.
                kept = [] if omni.samples else [(v, v.numpy()) for metric in model.metrics for v in metric.variables]
                omni.step(self._loss, batch)
                for variable, before in kept:
                    variable.assign(before)
                calls.on_train_batch_end(number, plain(results()))
            _add_up(omni, model)
            return plain(model.get_metrics_result())

        validate = None if validation_data is None else lambda: self.evaluate(validation_data)
        # One rank's wish to stop is everybody's: nobody may go on alone.
        return drive(
            model, calls, range(start, epochs), train, validate, lambda wish: any(omni._world.gather(bool(wish)))
        )

    def evaluate(self, data: Any, batch_size: int | None = None) -> dict[str, float]:
        dataset = self._omni.dataset(data, train=False, batch_size=batch_size)
        return self._omni._tester(self.model).run(dataset, lambda: _add_up(self._omni, self.model))

    def _loss(self, batch: Any) -> Any:
        return loss_of(self.model, batch, training=True)


class Tester:
    """Evaluates one compiled model; keeps what was traced for it."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self._traced: dict[str, Any] = {}

    def run(self, batches: Iterable[Any], add_up: Callable[[], None] = lambda: None) -> dict[str, float]:
        """The compiled loss and metrics over the batches, and over those of others where they are added up."""
        self.model.reset_metrics()
        for batch in batches:
            spec = tf.nest.map_structure(any_size, batch)
            if repr(spec) not in self._traced:
                self._traced[repr(spec)] = tf.function(self._test, input_signature=[spec])
            self._traced[repr(spec)](batch)
        add_up()
        logs = plain(self.model.get_metrics_result())
        self.model.reset_metrics()
        return logs

    def _test(self, batch: Any) -> None:
        loss_of(self.model, batch, training=False)


def drive(
    model: keras.Model,
    calls: keras.callbacks.CallbackList,
    epochs: Iterable[int],
    train: Callable[[int], dict[str, float]],
    validate: Callable[[], dict[str, float]] | None,
    stop: Callable[[Any], bool],
) -> keras.callbacks.History:
    """What ``model.fit`` does around its steps. ``train`` and ``validate`` give logs; ``stop`` hears of the model's
    wish to stop, and decides."""
    model.stop_training = False
    calls.on_train_begin()
    logs: dict[str, float] = {}
    for epoch in epochs:
        calls.on_epoch_begin(epoch)
        logs = train(epoch)
        if validate is not None:
            calls.on_test_begin()
            found = validate()
            calls.on_test_end(found)
            logs |= {f"val_{name}": value for name, value in found.items()}
        calls.on_epoch_end(epoch, logs)
        if stop(model.stop_training):
            break
    calls.on_train_end(logs)
    return model.history


def loss_of(model: keras.Model, batch: Any, training: bool) -> Any:
    """The compiled loss of a batch; the model's metrics count it."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    predicted = model(x, training=training)
    loss = model.compute_loss(x, y, predicted, weight, training=training)
    samples = tf.shape(tf.nest.flatten(x)[0])[0]  # Keras itself would count a batch of unknown size as one
    next(metric for metric in model.metrics if metric.name == "loss").update_state(loss, sample_weight=samples)
    model.compute_metrics(x, y, predicted, weight)
    return loss


def check(model: Any, callbacks: Sequence[Any] | None) -> None:
    """Refuse what would silently be done otherwise than ``model.fit`` does it."""
    if not isinstance(model, keras.Model) or not getattr(model, "compiled", False):
        raise UsageError("fit() needs a compiled Keras model: call model.compile(optimizer, loss, metrics=…) first")
    if type(model).train_step is not keras.Model.train_step:
        raise UsageError(
            f"{type(model).__name__} has a train_step of its own, which fit() cannot use: write the loop with "
            f"omni.dataset(…) and omni.step(compute_loss, batch)"
        )
    for loss in tf.nest.flatten(model.loss):
        if getattr(loss, "reduction", None) not in MEANS:
            raise UsageError(
                f"the loss {type(loss).__name__} has reduction={loss.reduction!r}: workers' losses are put together as "
                f"means over samples: use reduction='sum_over_batch_size' (the default)"
            )
    for callback in callbacks or ():
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise UsageError("BackupAndRestore restores rank 0 alone: use omni.save(folder) and omni.load(folder)")


def build(model: keras.Model, sample: Any) -> None:
    """Make all variables of model, loss and metrics, outside of any traced function."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(sample)
    predicted = model(x, training=False)
    model.compute_loss(x, y, predicted, weight, training=False)
    model.compute_metrics(x, y, predicted, weight)
    model.reset_metrics()
    model.optimizer.build(model.trainable_variables)


def callback_list(
    main: bool, model: Any, callbacks: Sequence[Any] | None, verbose: str | int, epochs: int, steps: int
) -> keras.callbacks.CallbackList:
    """The user's callbacks with History, and the progress bar where it is wanted; who writes does so on rank 0."""
    if verbose == "auto":
        verbose = 1 if sys.stdout.isatty() else 2  # a bar drawn over and over makes a mess of a log
    kept = [callback for callback in callbacks or () if main or not isinstance(callback, WRITERS)]
    return keras.callbacks.CallbackList(
        kept,
        add_history=True,
        add_progbar=main and verbose != 0,
        model=model,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
    )


def _add_up(omni: OmniLearn, model: keras.Model) -> None:
    """Metrics over the samples of all workers, on all of them."""
    variables = [variable for metric in model.metrics for variable in metric.variables]
    arrays = [np.asarray(variable.numpy(), dtype=np.float64) for variable in variables]
    if not arrays:
        return
    total, start = omni._sum(np.concatenate([a.reshape(-1) for a in arrays]), "adding metrics up"), 0
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(total[start : start + array.size].reshape(array.shape))
        start += array.size


def plain(logs: Any) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items()}
