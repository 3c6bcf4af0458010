"""Batches in asynchronous mode: leases from the server become index lists for torch's own DataLoader."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset

from omnilearn.control import apportion
from omnilearn.data import Permutation, Share, compare
from omnilearn.engine.source import Piece
from omnilearn.errors import InfeasibleError, UsageError
from omnilearn.pytorch.asynchronous.engine import AsyncEngine
from omnilearn.pytorch.evaluate import EvalLoader
from omnilearn.pytorch.loader import _data_loader, _mixed, last_of, to_device


class LeaseLoader:
    """Iterate it once per epoch. ``len`` is the number of global batches in an epoch: about as many as each worker's
    steps. The loop ends when every sample of the epoch has been used by somebody."""

    def __init__(
        self, engine: AsyncEngine, data: Any, *, shuffle: bool, seed: int, micro_batch: int | None, **options: Any
    ) -> None:
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            raise InfeasibleError(
                f"{type(data).__name__} has no length: asynchronous mode lends out ranges of a map-style dataset; "
                f"use one, or mode='sync'"
            )
        self._engine, self._micro_batch, self.shuffle, self.seed = engine, micro_batch, shuffle, seed
        self.size, batch = len(data), engine.global_batch
        last = last_of(options)
        if last == "merge":
            raise InfeasibleError("last='merge' is for mode='sync': in asynchronous mode a lease takes in what is left")
        self.usable = self.size // batch * batch if last == "drop" else self.size
        self.samples: compare.Fingerprints = []  # for the server, which compares them
        if self.usable < 1:
            raise InfeasibleError(
                f"the dataset has {self.size} samples, and none are left with drop_last and a global batch of {batch}"
            )
        self._pieces: deque[tuple[int, Piece]] = deque()
        self._order: tuple[int, Permutation] | None = None  # of an epoch
        self._waiting: deque[tuple[list[int], Piece]] = deque()  # micro-batches of the lease last taken
        self._generator: torch.Generator | None = None
        if options.get("generator") is None:
            self._generator = options["generator"] = torch.Generator()
        options.setdefault("pin_memory", engine.world.device.type == "cuda")
        self.dataloader = _data_loader(_Feed(self), {**options, "dataset": data})
        workers = self.dataloader.num_workers
        self.depth = 1 + (workers * (self.dataloader.prefetch_factor or 0) if workers else 0)

    def __len__(self) -> int:
        return -(-self.usable // self._engine.global_batch)

    @property
    def epoch(self) -> int:
        """The epoch that is under way or comes next."""
        return self._engine.epoch if self._engine.loader is self else self._engine.next_epoch

    def describe(self) -> dict[str, Any]:
        return {"size": self.size, "usable": self.usable, "shuffle": int(self.shuffle), "seed": self.seed,
                "depth": self.depth, "samples": self.samples}  # fmt: skip

    def close(self) -> None:
        self.dataloader._iterator = None

    def next_indices(self) -> list[int]:
        """For the DataLoader, which asks ahead of time: the next micro-batch of a lease; StopIteration: none now."""
        if not self._waiting:
            if not self._engine.queue:
                raise StopIteration
            lease = self._engine.queue.popleft()
            if self._order is None or self._order[0] != lease.epoch:
                self._order = lease.epoch, Permutation(self.size, self.seed, lease.epoch, self.shuffle)
            indices = self._order[1](lease.start, lease.stop)
            share = Share(self._engine._step, lease.epoch, lease.start, (lease.size,), indices, (0,))
            size = min(self._micro_batch or lease.size, lease.size)
            starts = range(0, lease.size, size)
            for start in starts:
                part = indices[start : start + size].tolist()
                self._waiting.append((part, Piece(share, len(part), start == 0, start == starts[-1])))
        part, piece = self._waiting.popleft()
        self._pieces.append((self._engine.generation, piece))
        return part

    def __iter__(self) -> Iterator[Any]:
        engine, device = self._engine, self._engine.world.device
        engine.begin_epoch(self)
        self._pieces.clear()
        self._waiting.clear()
        if self._generator is not None:
            self._generator.manual_seed(_mixed(self.seed, engine.rank, engine.epoch))
        try:
            while True:
                for batch in self.dataloader:
                    generation, piece = self._pieces.popleft()
                    if generation != engine.generation:
                        self._drop_old()
                        continue  # this worker was silent for too long, and others have these samples
                    engine.hand_out(piece)
                    yield to_device(batch, device)
                    engine.take_back(piece)
                if engine.end_epoch():
                    return
        except GeneratorExit:
            engine.leave()
            raise

    def _drop_old(self) -> None:
        """After leases were taken away: have new ones, so that the DataLoader does not run dry."""
        self._waiting.clear()
        self._engine.fill()


class _Feed:
    """The DataLoader's batch sampler. It may have nothing now and something later, as a generator could not."""

    def __init__(self, loader: LeaseLoader) -> None:
        self._loader = weakref.proxy(loader)

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> list[int]:
        indices: list[int] = self._loader.next_indices()
        return indices

    def __len__(self) -> int:
        return len(self._loader)


class AsyncEvalLoader(EvalLoader):
    """Evaluation, each sample once: between epochs split by speed over the workers, inside the loop all of it here."""

    def __init__(self, engine: AsyncEngine, data: Any, *, batch_size: int | None = None, **options: Any) -> None:
        batch_size = batch_size or max(1, engine.global_batch // max(engine.workers, 1))
        device = engine.world.device
        super().__init__(cast(Any, engine), data, device, engine.global_batch, batch_size=batch_size, **options)
        self._worker, self._size = engine, len(data)
        self._part = range(self._size)

    def part(self) -> range:
        return self._part

    def __iter__(self) -> Iterator[Any]:
        engine, size = self._worker, self._size
        self._part = range(size)
        if engine.loader is None:
            met = engine.meet({"evaluates": size})
            if any(value != {"evaluates": size} for value in met["values"]):
                raise UsageError(f"the workers do different things together: {met['values']}")
            place, count = met["ranks"].index(engine.rank), len(met["ranks"])
            least = 1 if size >= count else 0
            parts = apportion(np.asarray(met["speeds"]), size, np.full(count, least), np.full(count, size))
            start = int(parts[:place].sum())
            self._part = range(start, start + int(parts[place]))
        try:
            for batch in self._loader:
                yield to_device(batch, engine.world.device)
        finally:
            engine.restart_clock()
