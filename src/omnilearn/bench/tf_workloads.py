"""What the benchmarks train with TensorFlow: the same regimes as ``workloads``, as Keras models on NumPy data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from omnilearn.bench.names import Size
from omnilearn.errors import InfeasibleError, UsageError


@dataclass(frozen=True)
class Workload:
    """One thing to train. TensorFlow is loaded when its model is made, not before."""

    name: str
    model: Callable[[], Any]
    data: Callable[[int], tuple[Any, Any]]
    """So many samples ``(x, y)``, the same whenever and wherever they are made."""
    global_batch: int
    optimizer: Callable[[], Any]


def workload(name: str, size: str | Size = "small") -> Workload:
    """
    >>> workload("heavy").global_batch
    192
    """
    if isinstance(size, Size):
        if size.image or size.bf16:
            raise InfeasibleError("--image and --bf16 are not for TensorFlow's workloads")
        found = workload(name, size.kind)
        return replace(found, global_batch=size.batch) if size.batch else found
    if name not in _BUILDERS:
        raise InfeasibleError(f"unknown workload {name!r}; TensorFlow has {', '.join(_BUILDERS)}")
    return _BUILDERS[name](size == "full")


def images(n: int, *, shape: tuple[int, int, int], classes: int = 10) -> tuple[Any, Any]:
    """Noisy images of coarse coloured patterns: the pattern is the label."""
    draw, (height, width, channels) = np.random.default_rng(0), shape
    patterns = draw.normal(size=(classes, 4, 4, channels)) + draw.normal(size=(classes, 1, 1, channels))
    y = draw.integers(0, classes, n)
    x = 0.5 * draw.normal(size=(n, *shape)) + patterns[y].repeat(height // 4, axis=1).repeat(width // 4, axis=2)
    return x.astype(np.float32), y


def digits(n: int) -> tuple[Any, Any]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("the digits need scikit-learn: pip install -e '.[demo]' in a checkout of OmniLearn") from error
    raw = load_digits()
    at = np.arange(n) % len(raw.images)
    return (raw.images[at, :, :, None] / 16).astype(np.float32), raw.target[at]


def _convnet(shape: tuple[int, int, int], width: int, depth: int, kernel: int) -> Any:
    import keras

    convolve = partial(keras.layers.Conv2D, width, padding="same", activation="relu")
    return keras.Sequential(
        [
            keras.Input(shape),
            convolve(3),
            *(convolve(kernel) for _ in range(depth)),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )


def _mlp(shape: tuple[int, int, int], width: int) -> Any:
    import keras

    dense = [keras.layers.Dense(width, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input(shape), keras.layers.Flatten(), *dense, keras.layers.Dense(10)])


def _cnn(width: int) -> Any:
    import keras

    convolve = partial(keras.layers.Conv2D, kernel_size=3, padding="same", activation="relu")
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            convolve(width),
            convolve(2 * width),
            keras.layers.MaxPooling2D(2),
            convolve(2 * width),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def _sgd() -> Any:
    import keras

    return keras.optimizers.SGD(0.02, momentum=0.9)


def _adam() -> Any:
    import keras

    return keras.optimizers.Adam(0.002)


def _heavy(full: bool) -> Workload:
    shape, width, depth, batch = ((64, 64, 3), 64, 6, 512) if full else ((24, 24, 3), 32, 3, 192)
    return Workload("heavy", partial(_convnet, shape, width, depth, 5), partial(images, shape=shape), batch, _sgd)


def _even(full: bool) -> Workload:
    shape, width, batch = ((64, 64, 3), 64, 256) if full else ((32, 32, 3), 32, 64)
    return Workload("even", partial(_convnet, shape, width, 2, 3), partial(images, shape=shape), batch, _sgd)


def _chatty(full: bool) -> Workload:
    side = 64 if full else 32
    shape = (side, side, 1)
    return Workload("chatty", partial(_mlp, shape, side * side), partial(images, shape=shape), 64, _sgd)


def _digits(full: bool) -> Workload:
    return Workload("digits", partial(_cnn, 128 if full else 48), digits, 128, _adam)


_BUILDERS: dict[str, Callable[[bool], Workload]] = {
    "heavy": _heavy,
    "even": _even,
    "chatty": _chatty,
    "digits": _digits,
}
