"""What the workers of the tests do. Imported by them alone: the process of the tests itself loads no TensorFlow."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from omnilearn.data import Sampler
from omnilearn.tensorflow import OmniLearn
from omnilearn.tensorflow.asynchronous.step import learning_rate_times
from omnilearn.tensorflow.collectives import CYCLE, Group
from tests.script import Script

SIZE, FEATURES = 53, 6
PLANS = [(6, 4, 2), (2, 4, 6), (12, 0, 0), (0, 5, 7), (4, 4, 4), (1, 10, 1)]


@contextlib.contextmanager
def omnilearn(global_batch: int = 12, **options: Any) -> Iterator[OmniLearn]:
    omni = OmniLearn(global_batch, timeout=40, **{"policy": "uniform", "seed": 11, **options})
    yield omni
    omni.close()  # not on errors: those are the same on all ranks, and the processes live on


def boot() -> None:
    """Meet the others, before anything else uses TensorFlow."""
    with omnilearn():
        pass


def numbers() -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(7)
    x = draw.normal(size=(SIZE, FEATURES))
    return x, x @ draw.normal(size=(FEATURES, 2)), draw.integers(1, 9, SIZE)


def network(*middle: Any, dtype: str = "float64", features: int = FEATURES) -> keras.Model:
    keras.utils.set_random_seed(int(os.environ["RANK"]))  # different on each: rank 0's weights must win
    return keras.Sequential(
        [
            keras.Input((features,), dtype=dtype if dtype.startswith("float") else "float32"),
            keras.layers.Dense(16, activation="tanh", dtype=dtype),
            *middle,
            keras.layers.Dense(2, dtype=dtype),
        ]
    )


def optimizer(kind: str) -> keras.optimizers.Optimizer:
    return {
        "sgd": lambda: keras.optimizers.SGD(0.05),
        "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        "adam": lambda: keras.optimizers.Adam(0.01),
        "clipped": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.3),
    }[kind]()


def weights(model: keras.Model, optimizer: Any = None) -> list[Any]:
    return [np.asarray(v.numpy()) for v in [*model.weights, *(optimizer.variables if optimizer else ())]]


def far(ours: list[Any], theirs: list[Any]) -> float:
    """The largest relative difference."""
    return max(float(np.max(np.abs(a - b) / (np.abs(b) + 1e-3))) for a, b in zip(ours, theirs, strict=True))


# Exactness


def exact(kind: str, by_token: bool, micro_batch: int | None) -> dict[str, Any]:
    """Two epochs with changing batches, parked and returning workers and a tail; the same on one machine by hand."""
    x, y, tokens = numbers()
    with omnilearn(policy=Script(PLANS), micro_batch=micro_batch) as omni:
        model = network()
        start = [w.copy() for w in weights(model)]
        model, _ = omni.prepare(model, optimizer(kind))

        def compute_loss(batch: Any) -> Any:
            x, y, tokens = batch
            per_sample = tf.reduce_mean(tf.square(model(x, training=True) - y), axis=1)
            return (
                tf.reduce_sum(per_sample * tokens) / tf.reduce_sum(tokens) if by_token else tf.reduce_mean(per_sample)
            )

        first = omni._world.gather(start)[0]
        losses, used, sets = [], [], set()
        dataset = omni.dataset((x, y, tokens.astype(float)), shuffle=True)
        for _ in range(2):
            for batch in dataset:
                weight = float(tf.reduce_sum(batch[2])) if by_token else None
                losses.append(float(omni.step(compute_loss, batch, weight=weight)))
                used.append(len(batch[0]))
                sets.add(omni._engine.active)
        traces = len(omni._engine._functions)
        reference, their_losses = _by_hand(kind, first, compute_loss, model, by_token)
        return {
            "apart": far(reference, weights_after := [np.asarray(w) for w in _final]),
            "weights": weights_after,
            "samples": sum(used),
            "traces": traces,
            "sets": sets,
            "losses": losses,
            "their_losses": their_losses,
        }


_final: list[Any] = []


def _by_hand(kind: str, first: Any, compute_loss: Any, model: Any, by_token: bool) -> tuple[list[Any], list[float]]:
    """One process, plain Keras, on the same samples in the same order."""
    _final[:] = [w.copy() for w in weights(model)]
    x, y, tokens = numbers()
    for variable, value in zip(model.weights, first, strict=True):
        variable.assign(value)
    opt, sampler, losses = optimizer(kind), Sampler(SIZE, [12], seed=11), []
    opt.build(model.trainable_variables)
    for _ in range(2):
        for share in sampler.shares(0):
            i = share.indices
            with tf.GradientTape() as tape:
                loss = compute_loss((tf.constant(x[i]), tf.constant(y[i]), tf.constant(tokens[i].astype(float))))
            opt.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            losses.append(float(loss))
            sampler.consumed(share)
        sampler.next_epoch()
    return weights(model), losses


# Data


class Squares(keras.utils.PyDataset):
    """Batches of five samples, the last one of three."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.size = size

    def __len__(self) -> int:
        return -(-self.size // 5)

    def __getitem__(self, i: int) -> Any:
        ids = np.arange(5 * i, min(5 * i + 5, self.size))
        return np.stack([ids] * FEATURES, axis=1).astype("f4"), ids


def _source(kind: str) -> Any:
    ids = np.arange(SIZE)
    x = np.stack([ids] * FEATURES, axis=1).astype("f4")
    slices = tf.data.Dataset.from_tensor_slices((x, ids))
    if kind == "arrays":
        return x, ids
    if kind == "tensors":
        return tf.constant(x), tf.constant(ids)
    if kind == "tf.data":
        return slices.map(lambda x, i: (x + 1, i))
    if kind == "batched":
        return slices.shuffle(20).batch(4).prefetch(2)
    if kind == "stream":
        generated = tf.data.Dataset.from_generator(
            lambda: zip(x, ids, strict=True),
            output_signature=(tf.TensorSpec([FEATURES], tf.float32), tf.TensorSpec([], tf.int64)),
        )
        return generated.apply(tf.data.experimental.assert_cardinality(SIZE))
    return Squares()


def once(kind: str, shuffle: bool) -> list[list[int]]:
    """The samples this rank saw in each of two epochs, with plans that change and a worker that is parked."""
    with omnilearn(policy=Script([(5, 4, 3), (10, 0, 2), (1, 10, 1)], interval=2)) as omni:
        model, _ = omni.prepare(network(dtype="float32"), optimizer("sgd"))
        dataset, seen = omni.dataset(_source(kind), shuffle=shuffle), []
        for _ in range(2):
            seen.append([])
            for x, ids in dataset:
                assert x.shape[0] == ids.shape[0]
                seen[-1] += [int(i) for i in ids]
                omni.step(lambda batch: tf.reduce_mean(model(batch[0])) * 1e-9, (x, ids))
        return seen


def refused_data(kind: str) -> str:
    with omnilearn() as omni:
        omni.prepare(network(), optimizer("sgd"))
        data, options = {
            "infinite": lambda: (tf.data.Dataset.range(5).repeat(), {}),
            "unknown": lambda: (tf.data.Dataset.range(5).filter(lambda i: i > 1), {}),
            "deep shuffle": lambda: (tf.data.Dataset.range(50).shuffle(9).map(lambda i: i + 1), {}),
            "stream shuffled": lambda: (_source("stream"), {"shuffle": True}),
            "lengths": lambda: ((np.zeros((5, 2)), np.zeros(4)), {}),
            "generator": lambda: (iter([1, 2]), {}),
            "batch size": lambda: (np.zeros((50, 2)), {"batch_size": 4}),
        }[kind]()
        try:
            omni.dataset(data, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"


# Models


def consistent(kind: str) -> dict[str, Any]:
    """Train a model with BatchNorm or in mixed precision; what every rank has at the end."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(60, FEATURES)).astype("f4")
    y = (x @ draw.normal(size=(FEATURES, 2))).astype("f4")
    with omnilearn(policy=Script([(6, 4, 2), (6, 6, 0), (3, 3, 6)])) as omni:
        opt: Any = optimizer("sgd")
        if kind == "batchnorm":
            model = network(keras.layers.BatchNormalization(), dtype="float32")
        else:
            model = network(dtype="mixed_float16")
            opt = keras.optimizers.LossScaleOptimizer(opt, initial_scale=2.0**20)
        model, opt = omni.prepare(model, opt)
        minimum = int(omni._engine.planner.problem.minimum[0])

        def compute_loss(batch: Any) -> Any:
            return tf.reduce_mean(tf.square(tf.cast(model(batch[0], training=True), tf.float32) - batch[1]))

        losses: list[float] = []
        for _ in range(4):
            losses += [float(omni.step(compute_loss, batch)) for batch in omni.dataset((x, y), shuffle=True)]
        return {
            "weights": weights(model, opt),
            "losses": losses,
            "minimum": minimum,
            "dtypes": sorted({str(w.dtype) for w in model.weights}),
        }


# fit


def fitted(folder: str, epochs: int, early: bool) -> dict[str, Any]:
    """``fit`` with all kinds of callbacks; the same by Keras' own ``fit`` in this process."""
    draw = np.random.default_rng(2)
    x = draw.normal(size=(70, FEATURES)).astype("f4")
    y = (x[:, 0] > 0).astype("i4")
    test = (x[:20], y[:20])
    seen: list[Any] = []
    with omnilearn(14, policy=Script([(6, 4, 4), (7, 0, 7), (2, 6, 6)])) as omni:
        model = network(dtype="float32")
        model.compile(
            keras.optimizers.SGD(0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        rank = omni.rank
        callbacks = [
            keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=100.0),
            keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, min_delta=10.0),
            keras.callbacks.ModelCheckpoint(f"{folder}/{rank}/best.weights.h5", save_weights_only=True),
            keras.callbacks.CSVLogger(f"{folder}/{rank}.csv"),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append((epoch, dict(logs)))),
        ]
        if not early:
            callbacks = callbacks[1:]
        if find_spec("tensorboard"):
            callbacks.append(keras.callbacks.TensorBoard(f"{folder}/board-{rank}"))
        history = omni.fit(model, (x, y), epochs=epochs, validation_data=test, callbacks=callbacks, verbose=0)
        plain = model.evaluate(*test, verbose=0, return_dict=True)
        ours = omni.evaluate(model, test)
        return {
            "history": history.history,
            "seen": seen,
            "files": sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()),
            "plain": plain,
            "ours": ours,
            "lr": float(model.optimizer.learning_rate),
            "weights": weights(model, model.optimizer),
        }


def like_keras(kind: str) -> dict[str, Any]:
    """``fit`` on data of any kind, without shuffling; and Keras' own ``fit``, by one process, on the same batches."""
    draw = np.random.default_rng(4)
    x = draw.normal(size=(SIZE, FEATURES)).astype("f4")
    y, weight = (x[:, 0] > 0).astype("i4"), draw.uniform(0.5, 2, SIZE).astype("f4")

    class Numbered(keras.utils.PyDataset):
        def __len__(self) -> int:
            return -(-SIZE // 10)

        def __getitem__(self, i: int) -> Any:
            return x[10 * i : 10 * i + 10], y[10 * i : 10 * i + 10]

    data = {
        "arrays": lambda: (x, y),
        "sample weights": lambda: (x, y, weight),
        "tf.data": lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(7).prefetch(1),
        "pydataset": lambda: Numbered(),
    }[kind]()
    with omnilearn(policy=Script([(5, 4, 3), (10, 0, 2), (1, 10, 1)])) as omni:
        model = network(dtype="float32")
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        model.set_weights(omni._world.gather(model.get_weights())[0])
        first = model.get_weights()
        ours = omni.fit(model, data, epochs=2, shuffle=False, validation_data=data, verbose=0).history
        after = model.get_weights()
        other = keras.models.clone_model(model)
        other.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        other.set_weights(first)
        sample_weight = weight if kind == "sample weights" else None
        validation = (x, y) if sample_weight is None else (x, y, weight)
        theirs = other.fit(x, y, 12, 2, verbose=0, shuffle=False, sample_weight=sample_weight,
                           validation_data=validation).history  # fmt: skip
        return {"ours": ours, "theirs": theirs, "apart": far(after, other.get_weights())}


def bar() -> str:
    """What ``fit`` prints on this rank."""
    x, y, _ = numbers()
    with omnilearn() as omni, contextlib.redirect_stdout(io.StringIO()) as out:
        model = network()
        model.compile("sgd", "mse")
        omni.fit(model, (x, y), epochs=2, verbose=1)
    return out.getvalue()


def refused_fit(kind: str) -> str:
    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {}

    x, y, _ = numbers()
    with omnilearn() as omni:
        model, callbacks = network(dtype="float32"), []
        if kind == "own step":
            model = Own(model.inputs, model.outputs)
        if kind == "sum":
            model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
        elif kind != "not compiled":
            model.compile("sgd", "mse")
        if kind == "backup":
            callbacks = [keras.callbacks.BackupAndRestore("unused")]
        try:
            omni.fit(model, (x, y), callbacks=callbacks, verbose=0)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"


# Checkpoints, breaks, errors


def resumed(folder: str) -> dict[str, Any]:
    """An epoch and a half, saved in the middle; and the second part again from the checkpoint."""
    x, y, _ = numbers()

    def begin(omni: OmniLearn) -> tuple[Any, Any, Any]:
        model, opt = omni.prepare(network(keras.layers.BatchNormalization(dtype="float64")), optimizer("adam"))
        return model, opt, lambda batch: tf.reduce_mean(tf.square(model(batch[0], training=True) - batch[1]))

    with omnilearn() as omni:
        model, opt, compute_loss = begin(omni)
        nothing = omni.resume(folder)
        dataset = omni.dataset((x, y), shuffle=True)
        for _ in range(2):
            for batch in dataset:
                omni.step(compute_loss, batch)
                omni.save(folder, every=len(dataset) + 3, note="half way")
        through = weights(model, opt)
    with omnilearn() as omni:
        model, opt, compute_loss = begin(omni)
        extra = omni.resume(folder)
        epoch, step, rest = omni.epoch, omni.global_step - len(dataset), 0
        for batch in omni.dataset((x, y), shuffle=True):
            omni.step(compute_loss, batch)
            rest += len(batch[0])
        found = {"nothing": nothing, "extra": extra, "epoch": epoch, "step": step, "rest": rest}
        return {"through": through, "again": weights(model, opt), **found}


def broken_off() -> dict[str, Any]:
    """Breaks out of the loop while a worker is parked; then goes on. Means inside and outside of the loop."""
    x, y, _ = numbers()
    with omnilearn(policy=Script([(12, 0, 0), (6, 6, 0)])) as omni:
        model, _ = omni.prepare(network(), optimizer("sgd"))

        def compute_loss(batch: Any) -> Any:
            return tf.reduce_mean(tf.square(model(batch[0]) - batch[1]))

        inside = []
        dataset = omni.dataset((x, y), shuffle=True)
        for batch in dataset:
            omni.step(compute_loss, batch)
            inside.append(omni.mean(float(omni.rank)))
            if dataset.sampler.step == 4:
                break
        outside = omni.mean(omni.rank)
        after = [w.copy() for w in weights(model)]
        steps = sum(1 for batch in dataset if omni.step(compute_loss, batch) is not None)
        return {"inside": inside, "outside": outside, "after": after, "end": weights(model), "steps": steps}


def wrong(kind: str) -> str:
    """The error this rank gets."""
    x, y, _ = numbers()
    rank = int(os.environ["RANK"])
    x[0, 0] = np.nan if kind in ("nan", "skip") else x[0, 0]
    options: dict[str, Any] = {
        "option of one rank": {"seed": rank},
        "bad value on one rank": {"nonfinite": "ignore" if rank == 1 else "raise"},
        "skip": {"nonfinite": "skip"},
        "unknown rule": {"staleness": "whatever"},
        "sync and stale": {"staleness": "scale"},
    }.get(kind, {})
    try:
        with omnilearn(**options) as omni:
            layers = [keras.layers.Dense(3, dtype="float64")] if kind == "other model" and rank == 2 else []
            model, _ = omni.prepare(network(*layers), optimizer("sgd"))

            def compute_loss(batch: Any) -> Any:
                return tf.reduce_mean(tf.square(model(batch[0]) - batch[1]), axis=None if kind != "vector" else 1)

            for batch in omni.dataset((x[: SIZE - rank] if kind == "other data" else x, y[: SIZE - rank]
                                       if kind == "other data" else y)):  # fmt: skip
                if kind != "no step":
                    omni.step(compute_loss, batch)
                if kind == "twice":
                    omni.step(compute_loss, batch)
            return f"skipped {omni.skipped}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def events(folder: str) -> None:
    x, y, _ = numbers()
    with omnilearn(policy="optimal", log_dir=folder) as omni:
        model, _ = omni.prepare(network(), optimizer("sgd"))
        dataset = omni.dataset((x, y), shuffle=True)
        for _ in range(4):
            for batch in dataset:
                omni.step(lambda batch: tf.reduce_mean(tf.square(model(batch[0]) - batch[1])), batch)


# Asynchronous mode without processes of its own


def alone_async() -> dict[str, Any]:
    """Where there is no cluster, mode="async" trains in this process."""
    before = os.environ.pop("TF_CONFIG")
    try:
        x, y, _ = numbers()
        omni = OmniLearn(8, mode="async")
        with omni.scope():
            model = network()
            model.compile("sgd", "mse")
        history = omni.fit(model, (x, y), epochs=3, verbose=0).history
        return {"loss": history["loss"], "size": omni.world_size, "counts": vars(omni.counts)}
    finally:
        os.environ["TF_CONFIG"] = before


def scaled_update(kind: str) -> tuple[Any, Any]:
    """What an update changes, and what it changes with half of the learning rate."""

    def change(factor: float) -> Any:
        variable = keras.Variable(np.ones(3, "f4"))
        opt: Any = keras.optimizers.LossScaleOptimizer(optimizer("adam")) if kind == "scaler" else optimizer(kind)
        opt.build([variable])
        rate = float(opt.learning_rate)

        def update() -> None:
            with learning_rate_times(opt, tf.constant(factor, tf.float64)):
                opt.apply([opt.scale_loss(tf.constant([1.0, 2.0, 3.0]))], [variable])

        tf.function(update)()
        assert float(opt.learning_rate) == rate
        return 1 - variable.numpy()

    return change(1.0), change(0.5)


def refused_cluster(kind: str) -> str:
    before = os.environ["TF_CONFIG"]
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    task: dict[str, Any] = {"type": "chief", "index": 0}
    options: dict[str, Any] = {"mode": "async"}
    if kind == "sync with ps":
        options = {}
    if kind == "async without ps":
        del cluster["ps"]
    if kind == "evaluator":
        task = {"type": "evaluator", "index": 0}
    os.environ["TF_CONFIG"] = "{" if kind == "no json" else json.dumps({"cluster": cluster, "task": task})
    try:
        OmniLearn(8, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ["TF_CONFIG"] = before
    return "accepted"


def spread_in_turn() -> Any:
    """Everybody spreads something in turn, more often than there are instance keys."""
    group = Group(range(3), 60)
    heard = []
    for turn in range(4 * CYCLE):
        source, length = turn * turn % 3, 10 if turn % 4 else 2000
        data = bytes([turn]) * length
        heard.append(group.spread(data if os.environ["RANK"] == str(source) else None, source) == data)
    return heard
