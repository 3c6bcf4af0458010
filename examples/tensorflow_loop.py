"""The same with a loop of your own. Run: omnilearn run --framework tensorflow --nproc 3 examples/tensorflow_loop.py"""

import keras
from sklearn.datasets import load_digits

from omnilearn.tensorflow import OmniLearn

omni = OmniLearn(global_batch=96)  # before any tensor or model

digits = load_digits()
x_all, y_all = digits.images[..., None].astype("float32") / 16, digits.target
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
model, optimizer = omni.prepare(model, keras.optimizers.Adam(0.003))
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compute_loss(batch):
    x, y = batch
    return cross_entropy(y, model(x, training=True))


dataset = omni.dataset((x_all, y_all), shuffle=True)
for epoch in range(4):
    for x, y in dataset:  # this worker's share of the global batch
        loss = omni.step(compute_loss, (x, y))  # forward, backward, reduction, optimizer
    if omni.is_main:
        accuracy = (model.predict(x_all, verbose=0).argmax(1) == y_all).mean()
        print(f"epoch {epoch}: accuracy {accuracy:.3f}")
