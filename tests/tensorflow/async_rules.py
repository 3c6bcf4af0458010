"""An asynchronous script for the tests: ``async_rules.py STALENESS THRESHOLD FOLDER``.

One of its samples is not finite. It saves in the middle of the second epoch, trains on, and goes back to what it saved.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from omnilearn.tensorflow import OmniLearn

staleness, threshold, folder = sys.argv[1:]
omni = OmniLearn(24, mode="async", staleness=staleness, threshold=int(threshold), nonfinite="skip")
x = np.random.default_rng(0).normal(size=(240, 6)).astype("f4")
y = (x[:, 0] > 0).astype("i4")
x[7, 0] = np.nan
with omni.scope():
    layers = [keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), loss, metrics=["accuracy"])


def state() -> list[Any]:
    return [np.asarray(v.numpy()).tolist() for v in (*model.weights, *model.optimizer.variables)]


class Save(keras.callbacks.Callback):
    epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        omni.save(folder, every=1000)  # not yet
        if (self.epoch, batch) == (1, 3):
            omni.save(folder, note="half way")


def refused(call: Callable[[], Any]) -> str:
    try:
        return f"accepted: {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


errors = {
    "step": refused(lambda: omni.step(lambda batch: batch, x)),
    "dataset": refused(lambda: omni.dataset((x, y))),
    "mean": refused(lambda: omni.mean(1.0)),
    "load": refused(lambda: omni.load(folder)),
}
first = omni.fit(model, (x, y), epochs=3, callbacks=[Save()], validation_data=(x[20:], y[20:]), verbose=0)
counts, skipped = vars(omni.counts), omni._engine.skipped  # type: ignore[union-attr]
extra = omni.resume(folder)
loaded, loaded_counts, epoch = state(), vars(omni.counts), omni.epoch
second = omni.fit(model, (x, y), epochs=3, verbose=0)
print(json.dumps({
    "refused": errors, "counts": counts, "skipped": skipped, "extra": extra, "epoch": epoch, "loaded": loaded,
    "loaded_counts": loaded_counts, "end": vars(omni.counts), "second": second.history, "first": first.history,
    "workers": omni.world_size, "evaluated": omni.evaluate(model, (x[20:], y[20:])),
    "plain": {"loss": float(loss(y[20:], model(x[20:]))),
              "accuracy": float(np.mean(np.argmax(model(x[20:]), axis=1) == y[20:]))},
}))  # fmt: skip
