"""A Keras CNN on digits by fit. Run: omnilearn run --framework tensorflow --nproc 3 examples/tensorflow_fit.py"""

import keras
from sklearn.datasets import load_digits

from omnilearn.tensorflow import OmniLearn

omni = OmniLearn(global_batch=96)  # before any tensor or model

digits = load_digits()
x, y = digits.images[..., None].astype("float32") / 16, digits.target
train, test = (x[:1437], y[:1437]), (x[1437:], y[1437:])

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
model.compile(
    keras.optimizers.Adam(0.003),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
history = omni.fit(model, train, epochs=6, validation_data=test, callbacks=[stop])
if omni.is_main:
    print(f"accuracy {history.history['val_accuracy'][-1]:.3f}, batches {omni.plan.batches}")
