"""Groups of workers and what they do together: sums, rows, values, broadcasts, by TensorFlow's own collectives."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

CYCLE = 8
"""Instance keys that take turns. TensorFlow keeps a record of each for ever, so they are used again; a worker is never
more than one collective ahead of its peers."""
SMALL = 512
"""Bytes of a value that travels in one collective; a larger one needs a second."""

_groups = itertools.count(1000)  # group keys; every process forms the same groups in the same order


class Group:
    """Some of the workers. All of them call the same methods in the same order."""

    def __init__(self, workers: Sequence[int], timeout: float) -> None:
        self.workers, self.key = tuple(workers), next(_groups)
        self._timeout = timeout
        self._kinds: dict[Any, int] = {}  # an instance key belongs to one kind of operation, type and length
        self._used: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self.workers)

    def instance(self, *kind: Any) -> int:
        """The instance key for the next collective of this kind."""
        slot = self._kinds.setdefault(kind, len(self._kinds))
        turn = self._used[kind] = self._used.get(kind, -1) + 1
        return slot * CYCLE + turn % CYCLE

    def sum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        flat = np.ascontiguousarray(values, dtype=np.float64).reshape(-1)
        result = self._call(reduce_sum, flat, self.instance("sum", len(flat)))
        return result.reshape(np.shape(values))

    def rows(self, row: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Every member's row, in the order of ranks."""
        return self._call(_gather_op, row, self.instance("rows", row.dtype, len(row)))

    def _call(self, operation: Callable[..., Any], values: npt.NDArray[Any], instance: int) -> npt.NDArray[Any]:
        keys = tf.constant([len(self), self.key, instance], tf.int32)
        result = _function(operation, values.dtype, self._timeout)(tf.constant(values), keys)
        return np.asarray(result.numpy())

    def values(self, value: Any) -> list[Any]:
        """Every member's value, of any kind that can be pickled."""
        mine = pickle.dumps(value)
        first = self.rows(_words(len(mine).to_bytes(8, "little") + mine[: SMALL - 8], SMALL)).view(np.uint8)
        lengths = [int.from_bytes(row[:8].tobytes(), "little") for row in first]
        blobs = [row[8 : 8 + length].tobytes() for row, length in zip(first, lengths, strict=True)]
        longest = max(lengths) - (SMALL - 8)
        if longest > 0:
            rest = self.rows(_words(mine[SMALL - 8 :], _room(longest))).view(np.uint8)
            blobs = [
                blob + more[: max(0, length - len(blob))].tobytes()
                for blob, more, length in zip(blobs, rest, lengths, strict=True)
            ]
        return [pickle.loads(blob) for blob in blobs]

    def spread(self, data: bytes | None, source: int) -> bytes:
        """Data of any length from the member that is the source; None on the others."""
        head = None if data is None else len(data).to_bytes(8, "little") + data[: SMALL - 8]
        first = self.broadcast(head, SMALL, source)
        length = int.from_bytes(first[:8], "little")
        more = length - (SMALL - 8)
        rest = b""
        if more > 0:
            rest = self.broadcast(None if data is None else data[SMALL - 8 :], _room(more), source)
        return (first[8:] + rest)[:length]

    def broadcast(self, data: bytes | None, size: int, source: int) -> bytes:
        """``size`` bytes from the member that is the source; None on the others."""
        count = -(-size // 8)
        # TensorFlow remembers the source that an instance key had first: another one has keys of its own.
        key, options = self.instance("broadcast", count, source), {"communication_hint": "ring"}
        if data is not None:
            tf.raw_ops.CollectiveBcastSendV2(
                input=_words(data, 8 * count), group_size=len(self), group_key=self.key, instance_key=key,
                timeout_seconds=self._timeout, **options,
            )  # fmt: skip
            return data
        received = tf.raw_ops.CollectiveBcastRecvV2(
            group_size=len(self), group_key=self.key, instance_key=key, shape=[count], T=tf.int64,
            timeout_seconds=self._timeout, **options,
        )  # fmt: skip
        return bytes(received.numpy().tobytes()[:size])


def _room(length: int) -> int:
    """Bytes for so many: few different numbers, because each needs keys of its own."""
    return max(1 << (length - 1).bit_length(), 8)


def _words(data: bytes, size: int) -> npt.NDArray[np.int64]:
    """Bytes as the 64-bit numbers that collectives take."""
    return np.frombuffer(data.ljust(-(-size // 8) * 8, b"\0"), dtype=np.int64)


def reduce_sum(flat: Any, timeout: float, size: Any, group: Any, instance: Any) -> Any:
    """The sum over a group, inside a tf.function."""
    return tf.raw_ops.CollectiveReduceV2(
        input=flat, group_size=size, group_key=group, instance_key=instance, ordering_token=[], merge_op="Add",
        final_op="Id", communication_hint="ring", timeout_seconds=timeout,
    )  # fmt: skip


def _gather_op(row: Any, timeout: float, size: Any, group: Any, instance: Any) -> Any:
    return tf.raw_ops.CollectiveGatherV2(
        input=row[None], group_size=size, group_key=group, instance_key=instance, ordering_token=[],
        communication_hint="ring", timeout_seconds=timeout,
    )  # fmt: skip


@functools.cache
def _function(operation: Callable[..., Any], dtype: Any, timeout: float) -> Any:
    """A collective, traced. Concrete, because to look for the right trace costs as much as the collective itself."""

    def call(values: Any, keys: Any) -> Any:
        return operation(values, timeout, *tf.unstack(keys, 3))

    signature = [tf.TensorSpec([None], dtype), tf.TensorSpec([3], tf.int32)]
    return tf.function(call, input_signature=signature).get_concrete_function()
