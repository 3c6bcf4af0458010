"""Shares cut into micro-batches: every sample once, none too small, and nothing that could be read in two ways."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnilearn.pytorch.micro import cutter, sizes


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 4))
def test_sizes_hold_every_sample(samples: int, largest: int, minimum: int) -> None:
    parts = sizes(samples, largest, minimum)
    assert sum(parts) == samples
    assert max(parts) - min(parts) <= 1
    assert min(parts) >= min(minimum, samples)
    if largest >= 2 * minimum:
        assert max(parts) <= largest
        assert len(parts) == -(-samples // largest), "as few as can be"


Pair = namedtuple("Pair", "a b")
leaves = st.sampled_from(["tensor", "matrix", "array", "strings", "numbers", "constant"])
structures = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda v: ("list", v)),
        st.lists(inner, min_size=1, max_size=3).map(lambda v: ("tuple", v)),
        st.lists(inner, min_size=1, max_size=3).map(lambda v: ("dict", v)),
        st.tuples(inner, inner).map(lambda v: ("pair", v)),
    ),
    max_leaves=6,
)


def build(structure: Any, n: int) -> Any:
    """A batch of n samples of this structure, every entry of which says which sample it is of."""
    if structure == "tensor":
        return torch.arange(n)
    if structure == "matrix":
        return torch.arange(n).double().unsqueeze(1).expand(n, 2)
    if structure == "array":
        return np.arange(n)
    if structure == "strings":
        return [str(i) for i in range(n)]
    if structure == "numbers":
        return list(range(n))
    if structure == "constant":
        return None
    kind, inner = structure
    values = [build(value, n) for value in inner]
    if kind == "dict":
        return OrderedDict((str(i), value) for i, value in enumerate(values))
    return Pair(*values) if kind == "pair" else (list if kind == "list" else tuple)(values)


def seen(batch: Any, structure: Any) -> list[list[int]]:
    """Which samples each leaf of a batch holds."""
    if structure == "constant":
        return []
    if structure == "matrix":
        return [batch[:, 0].long().tolist()]
    if isinstance(structure, str):
        return [[int(i) for i in batch]]
    inner = list(batch.values()) if structure[0] == "dict" else list(batch)
    return [found for value, kind in zip(inner, structure[1], strict=True) for found in seen(value, kind)]


@given(structures, st.integers(4, 9), st.data())
def test_every_leaf_holds_the_same_samples(structure: Any, n: int, data: st.DataObject) -> None:
    batch = build(structure, n)
    cut = cutter(batch, n)
    if structure == "constant":
        assert cut is None
        return
    assert cut is not None
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    part = cut(start, stop)
    assert type(part) is type(batch)
    assert all(found == list(range(start, stop)) for found in seen(part, structure))


IMAGES = [torch.zeros(3, 8, 8), torch.zeros(3, 9, 8), torch.zeros(3, 8, 7)]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(7, 2), 4),  # tokens packed behind each other, say
        ({"x": torch.zeros(4, 2), "count": 4}, 4),  # a number may count the samples
        ({"x": torch.zeros(4, 2), "count": torch.tensor(4)}, 4),
        ([torch.zeros(3, 8, 8)] * 3, 3),  # three images with three channels, or three fields
        ((IMAGES, torch.zeros(3)), 3),
        (object(), 4),
        (None, 4),
        ([torch.zeros(4), torch.zeros(5)], 4),
    ],
)
def test_what_could_be_misread_is_not_cut(batch: Any, samples: int) -> None:
    assert cutter(batch, samples) is None


def test_as_many_fields_as_samples() -> None:
    cut = cutter([torch.zeros(2, 16), torch.zeros(2, 1)], 2)
    assert cut is not None
    assert [tuple(t.shape) for t in cut(0, 1)] == [(1, 16), (1, 1)]


def test_images_of_different_sizes_with_their_boxes() -> None:
    boxes = [{"boxes": torch.zeros(k, 4)} for k in range(1, 6)]
    images = [torch.zeros(3, 8 + k, 8) for k in range(5)]
    cut = cutter((images, boxes), 5)
    assert cut is not None
    assert [len(part) for part in cut(1, 4)] == [3, 3]
