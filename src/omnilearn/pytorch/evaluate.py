"""Evaluation: each sample once, split by speed over the workers that evaluate. Nobody waits for anybody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from omnilearn.engine import evaluation
from omnilearn.errors import InfeasibleError
from omnilearn.pytorch.loader import to_device

if TYPE_CHECKING:
    from omnilearn.pytorch.engine import SyncEngine


class EvalLoader:
    """This worker's part of a dataset, in order. Split anew for each iteration, by what is known of the speeds then."""

    def __init__(
        self,
        engine: SyncEngine,
        dataset: Any,
        device: torch.device,
        global_batch: int,
        *,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise InfeasibleError(f"{type(dataset).__name__} has no length: evaluation needs a map-style dataset")
        self._engine, self._dataset, self._device = engine, dataset, device
        self._batch_size = batch_size or max(1, global_batch // len(engine.everybody))
        options.setdefault("pin_memory", device.type == "cuda")
        self._feed = _Feed(self)
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._feed, **options)

    def part(self) -> range:
        """The samples of this worker."""
        engine, planner = self._engine, self._engine.planner
        return evaluation.part(
            engine.rank, engine.participants, len(self._dataset), self._batch_size, planner.state, planner.problem
        )

    def __len__(self) -> int:
        return len(self._feed)

    def __iter__(self) -> Iterator[Any]:
        engine = self._engine
        engine.settle("evaluation")
        place = engine.world.place("evaluation", f"{len(self._dataset)} samples")
        engine.membership.meet(place, engine.participants)
        engine.share_buffers()
        try:
            for batch in self._loader:
                yield to_device(batch, self._device)
        finally:
            self._engine.clock.restart()

    @property
    def batch_size(self) -> int:
        return self._batch_size


class _Feed:
    def __init__(self, loader: EvalLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        part, size = self._loader.part(), self._loader.batch_size
        for start in range(part.start, part.stop, size):
            yield list(range(start, min(start + size, part.stop)))

    def __len__(self) -> int:
        return -(-len(self._loader.part()) // self._loader.batch_size)
