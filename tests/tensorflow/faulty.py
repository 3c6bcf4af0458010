"""A training script in which something goes wrong: ``faulty.py KIND RANK MARK``. Run by ``omnilearn run``."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from omnilearn.tensorflow import OmniLearn
from tests.faults import Faults

kind, rank, mark = sys.argv[1:]
fault = Faults(kind, int(rank), 4, mark)
omni = OmniLearn(12, policy="uniform", timeout=15 if kind == "freeze" else 60)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
omni.prepare(model, keras.optimizers.SGD(0.01))


def compute_loss(batch: Any) -> Any:
    return tf.reduce_mean(tf.square(model(batch)))


for _ in range(1000):
    for batch in omni.dataset(np.ones((48, 4), dtype="f4")):
        omni.step(compute_loss, batch)
        fault(None)  # type: ignore[arg-type]
