"""Where the batches of a training loop come from, whatever fetches them: epochs, positions, one step after the other.

The sampler says which samples are in a share; the framework fetches them, in one piece or several. What happens between
two batches is the engine's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from omnilearn.data import Sampler, Share


@dataclass(frozen=True)
class Piece:
    """One micro-batch of a share. A share that is not cut has one. ``samples`` is how many count: none in an empty
    share, whose worker takes no part, nor where samples are ``lent`` to one that has none of its own in a small last
    step."""

    share: Share
    samples: int
    first: bool
    last: bool
    lent: int = 0

    @property
    def computed(self) -> int:
        return self.samples or self.lent


class Engine(Protocol):
    """What a source of batches needs of the engine that drives it."""

    rank: int

    def begin_epoch(self, source: Any) -> None: ...
    def begin_step(self, source: Any) -> bool: ...
    def enter(self, source: Any, share: Share) -> bool: ...
    def sit_out(self, source: Any, share: Share) -> None: ...
    def hand_out(self, piece: Piece) -> None: ...
    def take_back(self, source: Any, piece: Piece) -> None: ...
    def end_epoch(self, source: Any) -> bool: ...
    def leave(self, source: Any) -> None: ...


class Source(ABC):
    """Iterate it once per epoch. ``len`` is the number of steps of an epoch, the same on all ranks."""

    def __init__(self, engine: Engine, sampler: Sampler, prefetch: int) -> None:
        self._engine, self.sampler, self.prefetch = engine, sampler, prefetch
        self.horizon = prefetch  # raised to the deepest of all ranks
        self._fresh = True  # nothing of the current epoch was handed out yet, or it was restored

    @abstractmethod
    def _fetch(self) -> Generator[tuple[Piece, Any]]:
        """The pieces of this worker from the position to the end of the epoch, each with its batch."""

    def _deliver(self, batch: Any) -> Any:
        """The batch as the user gets it."""
        return batch

    def __len__(self) -> int:
        return self.sampler.steps

    @property
    def steps(self) -> int | None:
        """The number of steps of an epoch, as far as it is known."""
        return self.sampler.steps

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is (or the current one continues)."""
        return self.sampler.epoch if self._fresh else self.sampler.epoch + 1

    def restore(self, state: Mapping[str, int], epoch: int | None = None) -> None:
        """Continue at a saved position with the next iteration. ``epoch``: the one that the run goes on with. A source
        that is through with it gives nothing in its next iteration; one that ended before begins its next epoch."""
        self.sampler.load_state_dict(state)
        self._fresh = True
        if self.sampler.remaining_steps == 0 and (epoch is None or self.sampler.epoch < epoch):
            self.sampler.next_epoch()

    def __iter__(self) -> Iterator[Any]:
        engine = self._engine
        if not self._fresh:
            self.sampler.next_epoch()
        self._fresh = False
        engine.begin_epoch(self)
        with closing(self._fetch()) as pieces:
            try:
                while engine.begin_step(self):
                    piece, batch = next(pieces, (None, None))
                    if piece is None:
                        break
                    if not engine.enter(self, piece.share):
                        return  # the others have left
                    if not piece.computed:
                        engine.sit_out(self, piece.share)
                        continue
                    while True:
                        engine.hand_out(piece)
                        yield self._deliver(batch)
                        engine.take_back(self, piece)
                        if piece.last:
                            break
                        piece, batch = next(pieces)
                else:
                    return  # the others have left
            except GeneratorExit:
                engine.leave(self)
                raise
        if engine.end_epoch(self):
            self.sampler.next_epoch()
            self._fresh = True
