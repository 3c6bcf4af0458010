"""Cutting a share into micro-batches: into which sizes, and the batch itself where it is collated already.

Assumes nothing about what is in a batch that it cannot see: a part is cut only where there is exactly one way to read
it as one entry per sample, and everything else makes the batch one that cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

CONSTANT = (str, bytes, bool, type(None))
"""What may stand in a batch for all samples alike. Not a number: it could be a count of them."""


def sizes(samples: int, largest: int, minimum: int = 1) -> list[int]:
    """The fewest parts of at most ``largest``, as even as can be; none is below ``minimum``, which goes first.

    >>> sizes(64, 30), sizes(5, 2, minimum=2)
    ([22, 21, 21], [3, 2])
    """
    count = max(min(-(-samples // max(largest, 1)), samples // minimum), 1)
    small, more = divmod(samples, count)
    return [small + 1] * more + [small] * (count - more)


def cutter(batch: Any, samples: int) -> Callable[[int, int], Any] | None:
    """A function that gives samples ``start`` to ``stop`` of a batch, or None where the batch cannot be cut safely.

    >>> cut = cutter({"x": torch.arange(4), "names": ["a", "b", "c", "d"]}, 4)
    >>> cut(1, 3)
    {'x': tensor([1, 2]), 'names': ['b', 'c']}
    """
    return None if isinstance(batch, CONSTANT) else _cutter(batch, samples, outermost=True)


def _cutter(batch: Any, samples: int, outermost: bool = False) -> Callable[[int, int], Any] | None:
    if isinstance(batch, CONSTANT):
        return lambda start, stop: batch
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return (lambda start, stop: batch[start:stop]) if batch.ndim and len(batch) == samples else None
    if isinstance(batch, Mapping):
        return _rebuilt(list(batch.values()), samples, lambda parts: _like(batch, dict(zip(batch, parts, strict=True))))
    if isinstance(batch, (tuple, list)):
        kind: Any = type(batch)
        build = (lambda parts: kind(*parts)) if hasattr(batch, "_fields") else kind
        fields = _rebuilt(list(batch), samples, build)
        one_per_sample = len(batch) == samples and not hasattr(batch, "_fields")
        if not one_per_sample:
            return fields
        if fields is None or all(isinstance(value, CONSTANT) for value in batch):
            return lambda start, stop: batch[start:stop]
        # Two ways to read it: fields, whose number happens to be that of the samples, or a list of samples. These are
        # of one kind; fields hardly ever are, and least of all the outermost ones.
        kinds = {
            (type(v), getattr(v, "dtype", None), getattr(v, "shape" if outermost else "ndim", None)) for v in batch
        }
        return fields if len(kinds) > 1 else None
    return None


def _rebuilt(values: list[Any], samples: int, build: Callable[[list[Any]], Any]) -> Callable[[int, int], Any] | None:
    cutters = [_cutter(value, samples) for value in values]
    if None in cutters:
        return None
    return lambda start, stop: build([cut(start, stop) for cut in cutters if cut is not None])


def _like(batch: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    try:
        return type(batch)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts
