"""This process among its peers, whatever carries their messages: all ranks agree, and fail alike."""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from omnilearn.cluster.resources import Resources, peak_memory
from omnilearn.errors import OmniLearnError, UsageError

Floats = npt.NDArray[np.float64]


class Exchange(Protocol):
    """Rows of numbers on their way to one rank, the thinker, and its answer on the way back to all others."""

    def rows(self, awaited: Collection[int]) -> Floats:
        """On the thinker: one per rank, once those of the ``awaited`` are here.

        Of a rank whose row is not, the last number is none; the others are of an earlier row, if one came late.
        """

    def answer(self, data: bytes) -> None:
        """On the thinker: give the answer, without waiting for anybody. Empty ones are cheap."""

    def heard(self) -> bytes:
        """On the others: wait for the answer."""


class Peers(ABC):
    """What engines share of a world. A framework adds the messages."""

    rank: int
    size: int
    resources: tuple[Resources, ...]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""

    @abstractmethod
    def exchange(self, row: Floats, thinker: int) -> Exchange:
        """Begin to send a row, of the same length on all ranks, without waiting for anybody."""

    @abstractmethod
    def speed(self) -> float:
        """How fast this worker is now, in about a tenth of a second."""

    def peak_memory(self) -> int:
        """The most memory in use so far, in bytes: of the card where the framework says so, else of the process."""
        return peak_memory()

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        """An error in one rank's block is raised on all ranks. The block itself must not talk to the others."""
        mine: OmniLearnError | None = None
        try:
            yield
        except OmniLearnError as error:
            mine = error
        errors = self.gather(mine)
        for rank, theirs in enumerate(errors):
            if theirs is not None:
                same = all(str(other) == str(theirs) for other in errors)
                raise mine if same and mine else type(theirs)(f"on rank {rank}: {theirs}")

    def agree(self, what: str, values: dict[str, Any]) -> None:
        """Raise the same error on all ranks if ``values`` differ between them. Sent are hashes; only where these differ
        rank 0 sends its values to all, and each rank its first difference."""
        mine = {name: repr(value) for name, value in values.items()}
        digest = hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=16).digest()
        if len(set(self.gather(digest))) == 1:
            return
        first = self.gather(mine if self.rank == 0 else None)[0]
        names = [name for name in dict.fromkeys([*first, *mine]) if first.get(name) != mine.get(name)]
        name = names[0] if names else None
        differences = self.gather((name, mine.get(name or "")) if names else None)
        odd, (name, seen) = next((rank, theirs) for rank, theirs in enumerate(differences) if theirs is not None)
        raise UsageError(
            f"{what} differ between ranks: {name} is {first.get(name) or 'missing'} on rank 0 and {seen or 'missing'} "
            f"on rank {odd}: start all ranks with the same script, options and packages"
        )
