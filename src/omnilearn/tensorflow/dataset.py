"""Batches for the user's loop: this worker's share of each global batch.

Three kinds of data can be read at any sample: arrays, a tf.data.Dataset of known size, and a keras.utils.PyDataset. The
sampler says which samples; a thread fetches the next batches where fetching takes time. What happens between two
batches is left to the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from omnilearn.data import Permutation, Sampler, Share
from omnilearn.engine.source import Engine, Piece, Source
from omnilearn.errors import InfeasibleError, UsageError

AHEAD = 2
"""Batches fetched ahead where fetching takes time."""


class Samples(Protocol):
    """Data of which any samples can be had. ``scattered``: whether any order costs the same."""

    size: int
    scattered: bool
    ahead: int

    def fetch(self, indices: Any, epoch: int) -> Any: ...


class Arrays:
    """NumPy arrays or tensors, nested as the user likes, the first dimension being samples."""

    scattered, ahead = True, 0

    def __init__(self, data: Any) -> None:
        self._data = tf.nest.map_structure(lambda part: part if tf.is_tensor(part) else np.asarray(part), data)
        parts = tf.nest.flatten(self._data)
        sizes = {part.shape[0] if part.shape else None for part in parts}
        if len(sizes) != 1 or None in sizes:
            raise InfeasibleError(f"the arrays differ in their number of samples: {[tuple(p.shape) for p in parts]}")
        self.size = int(sizes.pop())  # type: ignore[arg-type]

    def fetch(self, indices: Any, epoch: int) -> Any:
        def pick(part: Any) -> Any:
            return tf.gather(part, indices) if tf.is_tensor(part) else tf.convert_to_tensor(part[indices])

        return tf.nest.map_structure(pick, self._data)


class Indexed:
    """A tf.data.Dataset of samples that TensorFlow can read at any index."""

    scattered, ahead = True, AHEAD

    def __init__(self, data: Any, size: int) -> None:
        self.size, spec = size, data.element_spec

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def fetch(indices: Any) -> Any:
            return tf.map_fn(lambda i: tf.data.experimental.at(data, i), indices, fn_output_signature=spec)

        self._fetch = fetch
        self.fetch(np.zeros(1, dtype=np.int64), 0)

    def fetch(self, indices: Any, epoch: int) -> Any:
        return self._fetch(np.asarray(indices, dtype=np.int64))


class Stream:
    """A tf.data.Dataset of samples that can only be read in its order: every rank reads all and keeps its part."""

    scattered, ahead = False, AHEAD

    def __init__(self, data: Any, size: int) -> None:
        self.size, self._data = size, data
        self._rest: Any = None
        self._at = self._epoch = -1

    def fetch(self, indices: Any, epoch: int) -> Any:
        first = int(indices[0])
        if self._rest is None or epoch != self._epoch or first < self._at:
            self._rest, self._at, self._epoch = iter(self._data), 0, epoch
        while self._at < first:
            self._next()
        taken = [self._next() for _ in range(len(indices))]
        return tf.nest.map_structure(lambda *parts: tf.stack(parts), *taken)

    def _next(self) -> Any:
        try:
            sample = next(self._rest)
        except StopIteration:
            raise UsageError(
                f"the dataset said it has {self.size} samples and ended after {self._at}: is it the same every time?"
            ) from None
        self._at += 1
        return sample


class Batches:
    """A keras PyDataset: numbered batches, all of one size but the last. Shuffled, whole batches change places."""

    scattered, ahead = False, AHEAD

    def __init__(self, data: Any, shuffle: bool, seed: int) -> None:
        count = data.num_batches if getattr(data, "num_batches", None) is not None else len(data)
        if not count:
            raise InfeasibleError("the PyDataset has no batches: its __len__ must say how many there are")
        self._data, self._count, self._shuffle, self._seed = data, count, shuffle, seed
        self._kept: dict[int, Any] = {}
        self._each, self._last = _length(self._get(0)), _length(self._get(count - 1))
        self.size = self._each * (count - 1) + self._last
        self._epoch = 0

    def fetch(self, indices: Any, epoch: int) -> Any:
        if epoch != self._epoch:
            self._kept, self._epoch = {}, epoch
        order = Permutation(self._count, self._seed, epoch, self._shuffle)(0, self._count)
        short = int(np.flatnonzero(order == self._count - 1)[0])  # where the one that may be shorter is now
        starts = np.arange(self._count) * self._each
        starts[short + 1 :] -= self._each - self._last
        parts, at, end = [], int(indices[0]), int(indices[-1]) + 1
        while at < end:
            place = int(np.searchsorted(starts, at, side="right")) - 1
            batch = self._get(int(order[place]))
            begin = at - int(starts[place])
            stop = min(_length(batch), begin + end - at)
            parts.append(tf.nest.map_structure(lambda part, b=begin, s=stop: part[b:s], batch))
            at += stop - begin
        if len(parts) == 1:
            return tf.nest.map_structure(tf.convert_to_tensor, parts[0])
        return tf.nest.map_structure(lambda *pieces: tf.concat(pieces, axis=0), *parts)

    def _get(self, number: int) -> Any:
        if number not in self._kept:
            while len(self._kept) > 1:  # a share's end and the next one's start are often in the same batch
                self._kept.pop(next(iter(self._kept)))
            self._kept[number] = self._data[number]
        return self._kept[number]


def _length(batch: Any) -> int:
    return int(tf.nest.flatten(batch)[0].shape[0])


def open_samples(data: Any, shuffle: bool, seed: int) -> tuple[Samples, bool]:
    """The data, readable at any sample, and whether the sampler is to shuffle it."""
    if isinstance(data, tf.data.Dataset):
        return _open_tf_data(data, shuffle)
    if isinstance(data, keras.utils.PyDataset):
        return Batches(data, shuffle, seed), False
    if callable(data) or isinstance(data, Iterator):
        raise InfeasibleError(
            f"{type(data).__name__} has no known size: give arrays, a tf.data.Dataset of known cardinality or a "
            f"keras.utils.PyDataset"
        )
    return Arrays(data), shuffle


def _open_tf_data(data: tf.data.Dataset, shuffle: bool) -> tuple[Samples, bool]:
    # batch(), shuffle() and prefetch() at the end are taken over: they are what OmniLearn does by itself.
    while (kind := type(data).__name__) in (
        "_BatchDataset",
        "_ParallelBatchDataset",
        "_PrefetchDataset",
        "_ShuffleDataset",
    ):
        shuffle = shuffle or kind == "_ShuffleDataset"
        data = data._input_dataset
    if any(type(step).__name__ == "_ShuffleDataset" for step in _ancestors(data)):
        raise InfeasibleError(
            "the dataset shuffles before its last steps, in another order on every rank: leave shuffle() out and use "
            "omni.dataset(data, shuffle=True), or make it the last step before batch()"
        )
    size = int(data.cardinality())
    if size < 1:
        what = "is infinite" if size == tf.data.INFINITE_CARDINALITY else "does not know its size"
        raise InfeasibleError(
            f"the tf.data.Dataset {what}: an epoch needs one: leave repeat() out, or use "
            f"dataset.apply(tf.data.experimental.assert_cardinality(n))"
        )
    try:
        return Indexed(data, size), shuffle
    except (tf.errors.UnimplementedError, tf.errors.InvalidArgumentError, NotImplementedError, ValueError) as error:
        if shuffle:
            raise InfeasibleError(
                f"TensorFlow cannot read this dataset at any index, so it cannot be shuffled exactly once "
                f"({str(error).splitlines()[0][:120]}): build it by from_tensor_slices(…).map(…), "
                f"or use shuffle=False"
            ) from None
    return Stream(data, size), False


def _ancestors(data: Any) -> Iterator[Any]:
    for parent in data._inputs():
        yield parent
        yield from _ancestors(parent)


class TrainDataset(Source):
    """Batches of any kind of samples, some of them fetched ahead where fetching takes time."""

    def __init__(self, engine: Engine, samples: Samples, sampler: Sampler) -> None:
        super().__init__(engine, sampler, samples.ahead)
        self._samples = samples

    def _fetch(self) -> Generator[tuple[Piece, Any]]:
        pool = ThreadPoolExecutor(1, "omnilearn-fetch") if self.prefetch else None
        try:
            queue: deque[tuple[Share, Any]] = deque()
            for share in self.sampler.shares(self._engine.rank):
                queue.append((share, self._begin(share, pool)))
                if len(queue) > self.prefetch:
                    yield _whole(*queue.popleft())
            while queue:
                yield _whole(*queue.popleft())
        finally:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self, share: Share, pool: ThreadPoolExecutor | None) -> Callable[[], Any]:
        indices = share.indices if len(share.indices) else share.lent
        if not len(indices):
            return lambda: None
        fetch = partial(self._samples.fetch, indices, share.epoch)
        return fetch if pool is None else pool.submit(fetch).result


def _whole(share: Share, batch: Callable[[], Any]) -> tuple[Piece, Any]:
    return Piece(share, len(share.indices), first=True, last=True, lent=len(share.lent)), batch()


class EvalDataset:
    """This worker's part of the data, in order, in batches. Split anew for each iteration, by the speeds known then."""

    def __init__(self, samples: Samples, part: Any, batch_size: int, begin: Any) -> None:
        self._samples, self._part, self._batch_size, self._begin = samples, part, batch_size, begin

    def __len__(self) -> int:
        return -(-len(self._part()) // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        part = self._part()
        for start in range(part.start, part.stop, self._batch_size):
            yield self._samples.fetch(np.arange(start, min(start + self._batch_size, part.stop)), 0)
