"""Asynchronous. Run: omnilearn run --framework tensorflow --nproc 3 --ps 1 examples/tensorflow_async.py"""

import keras
from sklearn.datasets import load_digits

from omnilearn.tensorflow import OmniLearn

omni = OmniLearn(global_batch=96, mode="async")  # workers and parameter servers serve in here until the end

digits = load_digits()
x, y = digits.images[..., None].astype("float32") / 16, digits.target
train, test = (x[:1437], y[:1437]), (x[1437:], y[1437:])

with omni.scope():  # the model lives on the parameter server
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
history = omni.fit(model, train, epochs=4, validation_data=test)
print(f"accuracy {history.history['val_accuracy'][-1]:.3f}, {omni.counts}, batches {omni.plan.batches}")
