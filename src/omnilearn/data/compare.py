"""Is sample i the same on every machine? Some samples, fetched on all ranks under the same random numbers, are hashed
and compared: another copy of the data, or files listed in another order, would repeat some samples and skip others."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from omnilearn.errors import UsageError

log = logging.getLogger("omnilearn")

SAMPLES = 6
"""So many samples are compared: the first, the last, and some between."""
SECONDS = 3.0
"""No more samples are fetched when it took so long already."""


Fingerprints = list[tuple[int, str]]
"""Of some samples, by index; "" of one that is random beyond what can be seeded, which says nothing."""


def same_samples(mine: Fingerprints, gather: Callable[[Any], list[Any]], hosts: Sequence[str]) -> None:
    """Raise the same error on all ranks where a sample differs. ``gather``: everybody's value."""
    everybody = gather(mine)
    for rank, theirs in enumerate(everybody):
        index = first_difference(everybody[0], theirs)
        if index is not None:
            raise UsageError(difference(index, f"rank 0 ({hosts[0]}) and rank {rank} ({hosts[rank]})"))


def first_difference(ours: Fingerprints, theirs: Fingerprints) -> int | None:
    for (index, one), (_, other) in zip(ours, theirs, strict=False):  # a slow one has fewer
        if one and other and one != other:
            return index
    return None


def difference(index: int, who: str) -> str:
    return (
        f"sample {index} of the data set is not the same on all workers: {who} differ, so that some samples would be "
        f"used twice and others never: are the files the same, and listed in the same order (sorted(os.listdir(…)))? "
        f"Where samples are random on purpose, draw from the global random numbers of torch, NumPy or Python; "
        f"check_data=False turns this check off"
    )


def fingerprints(
    data: Any, size: int, seeded: Callable[[int], contextlib.AbstractContextManager[None]]
) -> Fingerprints:
    """Some indices, the same for every copy of the data, and a hash of what is there. ``seeded``: a context in which
    random numbers begin with this seed, and after which they are what they were."""
    found: Fingerprints = []
    began = time.monotonic()
    for index in _indices(size):
        try:
            twice = []
            for _ in range(2):
                with seeded(index):
                    twice.append(_digest(_fetch(data, index)))
        except Exception as error:  # the loader will say it better
            log.debug("sample %d could not be compared: %s", index, error)
            break
        found.append((index, twice[0] if twice[0] == twice[1] else ""))
        if time.monotonic() - began > SECONDS:
            break
    return found


def _indices(size: int) -> list[int]:
    between = np.random.default_rng(size).integers(0, size, SAMPLES - 2).tolist()
    return list(dict.fromkeys([0, size - 1, *between]))


def _fetch(data: Any, index: int) -> Any:
    if hasattr(data, "__getitems__"):
        return data.__getitems__([index])
    return data[index]


@contextlib.contextmanager
def numbers(seed: int) -> Iterator[None]:
    """Python's and NumPy's random numbers begin with this seed."""
    python, numpy = random.getstate(), np.random.get_state(legacy=True)  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _digest(sample: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, sample, 0)
    return digest.hexdigest()


def _add(digest: Any, value: Any, depth: int) -> None:
    """What is in it, as bytes; of what is not known only its type."""
    digest.update(type(value).__name__.encode())
    if isinstance(value, (str, bytes, int, float, complex, bool, np.generic)) or value is None:
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping) and depth < 8:
        for key in value:
            _add(digest, key, depth + 1)
            _add(digest, value[key], depth + 1)
    elif isinstance(value, (tuple, list)) and depth < 8:
        for part in value:
            _add(digest, part, depth + 1)
    elif hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor, of whatever framework
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        value = value.detach().cpu()
        try:
            array = value.numpy()
        except TypeError:  # a type that NumPy does not have
            array = value.float().numpy()
        digest.update(np.ascontiguousarray(array).tobytes())
    elif hasattr(value, "__array__"):
        array = np.asarray(value)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes() if array.dtype != object else repr(array).encode())
    elif hasattr(value, "tobytes"):  # an image
        digest.update(value.tobytes())
