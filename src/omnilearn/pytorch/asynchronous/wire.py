"""What worker and server say to each other: a header of whole numbers, then flat buffers, over a gloo group of two.

Every message has a magic number and a version, and every length is checked against what both sides know before
anything is received. Values travel as JSON and raw tensors: nothing that comes from a peer is unpickled. Buffers go in
chunks, because with larger messages a peer that dies in the middle is noticed late. A gradient's buckets come ahead of
the header of their message, whenever they are ready, each under a tag of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from omnilearn.errors import OmniLearnError, UsageError
from omnilearn.pytorch.membership import CHUNK

MAGIC, PROTOCOL = 0x4F4D4E49, 3
LARGEST_NOTE = 64 * 2**20
BUCKET = 2**20
"""Bytes of a gradient that leave together, where it consists of small tensors; and of their chunks."""
MOST_LEASES, MOST_GROUPS, MOST_OTHERS = 16, 32, 8

# Requests
PUSH, PULL, BEGIN, END, LEAVE, MEET, SAY, SAVE, LOAD, BYE = range(1, 11)
NAMES = dict(enumerate(("push", "pull", "begin", "end", "leave", "meet", "say", "save", "load", "bye"), 1))
# Answers
OK, LATE, NOT_FINITE, DISCARDED, FAILED = range(5)
# Parts of a message, in this order: trainable parameters or their gradients, which gradients there are, buffers,
# frozen parameters, a note
VALUES, FLAGS, BUFFERS, FROZEN, NOTE = 1, 2, 4, 8, 16

_FIELDS = (
    "magic", "protocol", "kind", "parts", "note", "version", "generation", "epoch", "over", "leases", "samples",
    "batch", "rates", "seconds", "held", "workers", "main",
    "again", "step",
)  # fmt: skip
_AT = {name: i for i, name in enumerate(_FIELDS)}
_LEASES = 24
_RATES = _LEASES + 2 * MOST_LEASES
_OTHERS = _RATES + MOST_GROUPS
LENGTH = _OTHERS + 3 * MOST_OTHERS
_SECONDS = ("seconds", "held")


class Disconnected(OmniLearnError):
    """The peer is gone: its process ended, or it did not answer in time."""


class Nonsense(OmniLearnError):
    """The peer said something that no OmniLearn of this version says."""


class Header:
    """The numbers of a message, by name. ``seconds`` and ``held`` are seconds, all others whole numbers."""

    def __init__(self, kind: int = 0, **fields: float) -> None:
        self.tensor = torch.zeros(LENGTH, dtype=torch.int64)
        self._numbers = self.tensor.numpy()  # the same memory; much quicker to read and write one by one
        self["magic"], self["protocol"], self["kind"] = MAGIC, PROTOCOL, kind
        for name, value in fields.items():
            self[name] = value

    def __setitem__(self, name: str, value: float) -> None:
        self._numbers[_AT[name]] = int(value * 1e9) if name in _SECONDS else int(value)

    def __getitem__(self, name: str) -> Any:
        value = int(self._numbers[_AT[name]])
        return value / 1e9 if name in _SECONDS else value

    @property
    def ranges(self) -> list[tuple[int, int]]:
        flat = self._numbers[_LEASES : _LEASES + 2 * self["leases"]].tolist()
        return list(zip(flat[::2], flat[1::2], strict=True))

    @ranges.setter
    def ranges(self, values: Sequence[tuple[int, int]]) -> None:
        self["leases"] = len(values)
        for i, (start, stop) in enumerate(values):
            self._numbers[_LEASES + 2 * i : _LEASES + 2 * i + 2] = start, stop

    @property
    def learning_rates(self) -> list[float]:
        rates: list[float] = self._floats()[_RATES : _RATES + self["rates"]].tolist()
        return rates

    @learning_rates.setter
    def learning_rates(self, values: Sequence[float]) -> None:
        values = values[:MOST_GROUPS]
        self["rates"] = len(values)
        self._floats()[_RATES : _RATES + len(values)] = values

    @property
    def scheduled(self) -> npt.NDArray[np.float64]:
        """For each of the others: how far its steps inside the loop go, how many were outside, with what metric."""
        return self._floats()[_OTHERS:].reshape(MOST_OTHERS, 3)

    def _floats(self) -> npt.NDArray[np.float64]:
        floats: npt.NDArray[np.float64] = self._numbers.view(np.float64)
        return floats

    def check(self, kinds: Sequence[int]) -> None:
        if self["magic"] != MAGIC or self["protocol"] != PROTOCOL:
            raise Nonsense(
                f"not a message of OmniLearn's protocol {PROTOCOL} (it begins with {self._numbers[:2].tolist()})"
            )
        if self["kind"] not in kinds:
            raise Nonsense(f"unknown kind of message {self['kind']}")
        if not (0 <= self["leases"] <= MOST_LEASES and 0 <= self["rates"] <= MOST_GROUPS):
            raise Nonsense(f"impossible counts in a message: {self['leases']} leases, {self['rates']} learning rates")
        if not 0 <= self["note"] <= LARGEST_NOTE or bool(self["note"]) != bool(self["parts"] & NOTE):
            raise Nonsense(f"a note of {self['note']} bytes")


PROMPT = timedelta(seconds=20)
"""The server takes every message at once, whatever else it does: one that takes no chunk for so long is gone."""


class Pair:
    """This process and one peer, in a gloo group of their own. ``me`` is 0 for the server, 1 for a worker."""

    def __init__(self, store: Any, name: str, me: int, device: Any, timeout: timedelta) -> None:
        """``device``: gloo's, of the address that the peer reaches."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._devices = timeout, [device]
        options._threads = 1  # for collectives, of which there are none
        self._peer, self._timeout = 1 - me, timeout
        self._prompt = min(PROMPT, timeout) if me else None
        try:
            self._group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), me, 2, options)
        except RuntimeError as error:
            raise Disconnected(f"no connection could be made ({_first_line(error)})") from error
        self._ahead: list[Any] = []  # buckets under way
        self._failure = "the connection was closed before"

    def limit(self, timeout: timedelta) -> None:
        """Wait so long at most from now on."""
        self._timeout = timeout

    def send(self, header: Header, parts: Sequence[torch.Tensor] = ()) -> None:
        limit = self._timeout
        if self._prompt is not None:
            limit = min(limit, self._prompt)
            self._finish(limit)  # what is ahead of the header on the line
        self._all("send", [header.tensor, *parts], limit)

    def send_ahead(self, number: int, bucket: torch.Tensor) -> None:
        """Send a bucket, without waiting; if that fails, the next ``send`` says so."""
        with contextlib.suppress(Disconnected):
            self._ahead += self._start("send", bucket.split(BUCKET), 1 + number)

    def expect(self, buckets: Sequence[torch.Tensor]) -> None:
        """Take these buckets whenever they come; ``receive_expected`` waits for the last of them."""
        for number, bucket in enumerate(buckets):
            self._ahead += self._start("recv", bucket.split(BUCKET), 1 + number)

    def receive_expected(self) -> None:
        self._finish(self._timeout)

    def receive_header(self, kinds: Sequence[int], timeout: timedelta | None = None) -> Header:
        header = Header()
        self._all("recv", [header.tensor], timeout or self._timeout)
        header.check(kinds)
        return header

    def receive(self, parts: Sequence[torch.Tensor]) -> None:
        """The parts that a header announced, into these buffers."""
        self._all("recv", parts, self._timeout)

    def receive_note(self, header: Header) -> Any:
        if not header["note"]:
            return None
        note = torch.empty(header["note"], dtype=torch.uint8)
        self.receive([note])
        return decode(note)

    def close(self) -> None:
        self._group = None
        self._ahead.clear()

    def _all(self, act: str, tensors: Sequence[torch.Tensor], timeout: timedelta) -> None:
        self._wait(self._start(act, [chunk for tensor in tensors for chunk in _chunks(tensor)], 0), timeout)

    def _finish(self, timeout: timedelta) -> None:
        """Wait for the buckets under way: so long for each chunk."""
        works, self._ahead = self._ahead, []
        self._wait(works, timeout)

    def _start(self, act: str, chunks: Sequence[torch.Tensor], tag: int) -> list[Any]:
        with self._noticing():
            return [getattr(self._group, act)([chunk], self._peer, tag) for chunk in chunks]

    def _wait(self, works: Sequence[Any], timeout: timedelta) -> None:
        with self._noticing():
            for work in works:
                work.wait(timeout)

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        """What gloo raises means that the peer is gone; there is no way back."""
        if self._group is None:
            raise Disconnected(self._failure)
        try:
            yield
        except RuntimeError as error:
            self._group, self._failure = None, _first_line(error)
            raise Disconnected(self._failure) from error


def _chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return tensor.split(CHUNK) if tensor.dtype == torch.uint8 and len(tensor) > CHUNK else [tensor]


def _first_line(error: BaseException) -> str:
    """What went wrong, without the source lines and the advice that gloo adds."""
    line = (str(error).splitlines() or [""])[0].partition(". This is")[0]
    return re.sub(r"^\[\S*pair\.cc:\d+\] ", "", line)


# Values as bytes


def encode(value: Any) -> torch.Tensor:
    """Tensors, numbers, strings, lists, tuples and dicts as bytes: JSON, and the tensors' own bytes behind it."""
    tensors: list[torch.Tensor] = []

    def plain(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            tensors.append(item.detach().cpu().contiguous())
            return {"tensor": [str(item.dtype).removeprefix("torch."), list(item.shape)]}
        if isinstance(item, dict):
            return {"dict": [[plain(key), plain(entry)] for key, entry in item.items()]}
        if isinstance(item, tuple):
            return {"tuple": [plain(entry) for entry in item]}
        if isinstance(item, list):
            return [plain(entry) for entry in item]
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        raise UsageError(f"a {type(item).__name__} cannot be sent: use tensors, numbers, strings, lists and dicts")

    text = json.dumps(plain(value)).encode()
    raw = b"".join([struct.pack("<q", len(text)), text])
    parts = [torch.frombuffer(bytearray(raw), dtype=torch.uint8)]
    parts += [tensor.reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(parts)


def decode(note: torch.Tensor) -> Any:
    raw = note.numpy().tobytes()
    try:
        (length,) = struct.unpack_from("<q", raw)
        if not 0 <= length <= len(raw) - 8:
            raise ValueError(f"{length} bytes of JSON in {len(raw)}")
        content, at = json.loads(raw[8 : 8 + length]), 8 + length

        def rich(item: Any) -> Any:
            nonlocal at
            if isinstance(item, list):
                return [rich(entry) for entry in item]
            if not isinstance(item, dict):
                return item
            ((kind, inside),) = item.items()
            if kind == "dict":
                return {rich(key): rich(entry) for key, entry in inside}
            if kind == "tuple":
                return tuple(rich(entry) for entry in inside)
            name, shape = inside
            dtype = getattr(torch, name)
            if kind != "tensor" or not isinstance(dtype, torch.dtype):
                raise ValueError(f"unknown {kind} {name}")
            empty = torch.empty(shape, dtype=dtype)
            size = empty.numel() * empty.element_size()
            if size:
                empty.copy_(torch.frombuffer(bytearray(raw[at : at + size]), dtype=dtype).view(shape))
            at += size
            return empty

        return rich(content)
    except (ValueError, TypeError, AttributeError, RuntimeError, struct.error, RecursionError) as error:
        raise Nonsense(f"a note that cannot be read ({_first_line(error)})") from error
