"""An asynchronous training script for the tests: ``async_job.py FOLDER``. Worker 1 is killed after the first fit."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from omnilearn.tensorflow import OmniLearn
from tests.script import Script

folder = Path(sys.argv[1])


def end_when_told() -> None:
    while not (folder / "now").exists():
        time.sleep(0.05)
    (folder / "killed").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("RANK") == "1":
    threading.Thread(target=end_when_told, daemon=True).start()

omni = OmniLearn(24, mode="async", policy=Script([(12, 12), (4, 20), (16, 8)], interval=2), staleness="scale")
draw = np.random.default_rng(0)
x = draw.normal(size=(240, 6)).astype("f4")
y = (x[:, 0] > 0).astype("i4")
with omni.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.3), loss, metrics=["accuracy"])


def tell(history: Any) -> dict[str, Any]:
    counts = omni.counts
    return {
        "updates": counts.updates,
        "samples": counts.samples,
        "history": history.history,
        "batches": omni.plan.batches,
        "traces": omni._engine.traced.experimental_get_tracing_count(),  # type: ignore[union-attr]
        "iterations": int(model.optimizer.iterations.numpy()),
    }


before = tell(omni.fit(model, (x, y), epochs=4, validation_data=(x, y), verbose=0))
kill = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: (folder / "now").touch())
after = tell(omni.fit(model, (x, y), epochs=4, validation_data=(x, y), callbacks=[kill], verbose=0))
print(json.dumps({"before": before, "after": after}))
