"""A training state as one run of bytes: every tensor is copied once to pack it and once to take it out again.

What is not a tensor is pickled, so parcels are for ranks of one job, which trust each other; files are written and read
by ``checkpoint.py``.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

ALIGNED = 64
"""Tensors begin at multiples of so many bytes."""
Place = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Where a tensor lies, and its type, shape and strides."""


def pack(state: Any) -> torch.Tensor:
    """The bytes of ``state``, on the CPU: a copy, whatever becomes of the state afterwards."""
    words = io.BytesIO()
    pickler = _Pickler(words)
    pickler.dump(state)
    text = words.getbuffer()
    parcel = torch.empty(_aligned(8 + len(text)) + pickler.size, dtype=torch.uint8)
    parcel[:8] = torch.tensor([len(text)]).view(torch.uint8)
    parcel[8 : 8 + len(text)] = torch.frombuffer(text, dtype=torch.uint8)
    inside = parcel[_aligned(8 + len(text)) :]
    for place, tensor in pickler.found:
        _at(inside, place).copy_(tensor)
    return parcel


def unpack(parcel: torch.Tensor) -> Any:
    """The state, with tensors of its own on the CPU."""
    length = int(parcel[:8].view(torch.int64))
    inside = parcel[_aligned(8 + length) :]
    return _Unpickler(io.BytesIO(parcel[8 : 8 + length].numpy().tobytes()), inside).load()


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and says in their stead where they will be. One that occurs twice (tied weights) lies there
    once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.found: list[tuple[Place, torch.Tensor]] = []
        self.size = 0
        self._places: dict[Any, Place] = {}

    def persistent_id(self, item: Any) -> Place | None:
        if type(item) not in (torch.Tensor, torch.nn.Parameter) or item.layout != torch.strided or item.is_quantized:
            return None  # pickled like everything else
        tensor = item.detach()
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        if key not in self._places:
            dense = torch.empty_like(tensor, device="meta")  # strides are kept where they leave no gaps
            self._places[key] = self.size, tensor.dtype, tuple(dense.shape), dense.stride()
            self.found.append((self._places[key], tensor))
            self.size = _aligned(self.size + dense.nbytes)
        return self._places[key]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, inside: torch.Tensor) -> None:
        super().__init__(file)
        self._inside = inside
        self._taken: dict[Place, torch.Tensor] = {}

    def persistent_load(self, place: Place) -> torch.Tensor:
        if place not in self._taken:
            self._taken[place] = _at(self._inside, place).clone()  # else one tensor would keep all others' bytes
        return self._taken[place]


def _at(inside: torch.Tensor, place: Place) -> torch.Tensor:
    start, dtype, shape, stride = place
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return inside[start : start + size].view(dtype).as_strided(shape, stride)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
