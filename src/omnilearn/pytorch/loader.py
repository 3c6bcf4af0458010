"""Batches for the user's loop: this worker's share of each global batch, on its device.

The sampler says which samples; torch's own DataLoader fetches, collates, pins and prefetches them. One index list per
micro-batch goes into it, an empty one for a step this worker sits out, so that all ranks stay in step and a new plan
rebuilds nothing. What happens between two batches is left to the engine.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import lru_cache, partial
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from omnilearn.data import Sampler, Share, compare
from omnilearn.data.cut import Cut
from omnilearn.data.sampler import NONE, too_small
from omnilearn.engine.source import Engine, Piece, Source
from omnilearn.errors import InfeasibleError, UsageError, meant
from omnilearn.pytorch import micro


class TrainLoader(Source):
    """Batches of a map-style dataset."""

    def __init__(
        self, engine: Engine, sampler: Sampler, micro_batch: int | None, device: torch.device, **options: Any
    ) -> None:
        self._generator: torch.Generator | None = None
        if options.get("generator") is None:
            # Its own: a DataLoader draws a seed for its workers, and resuming must not shift torch's.
            self._generator = options["generator"] = torch.Generator()
        self.dataloader = _data_loader(_Feed(self), options)
        workers = self.dataloader.num_workers
        super().__init__(engine, sampler, workers * (self.dataloader.prefetch_factor or 0) if workers else 0)
        self._begin(micro_batch, device)

    def _begin(self, micro_batch: int | None, device: torch.device) -> None:
        self._device = device
        # A share's micro-batches; the engine may know better.
        self.cut: Callable[[int], list[int]] = partial(_bounded, micro_batch)
        self._pieces: deque[Piece] = deque()

    def close(self) -> None:
        """End persistent workers."""
        self.dataloader._iterator = None

    def pull(self) -> Iterator[list[int]]:
        """Index lists for the DataLoader, which asks for them ahead of time."""
        for share in self.sampler.shares(self._engine.rank):
            if lent := share.lent.tolist():
                self._pieces.append(Piece(share, 0, True, True, len(lent)))
                yield lent
                continue
            for part, first, last in _parts(share.indices.tolist(), self.cut):
                self._pieces.append(Piece(share, len(part), first, last))
                yield part

    def _fetch(self) -> Generator[tuple[Piece, Any]]:
        self._pieces.clear()
        if self._generator is not None:  # what DataLoader workers draw depends on the epoch, not on the history
            self._generator.manual_seed(_mixed(self.sampler.seed, self._engine.rank, self.sampler.epoch))
        for batch in self.dataloader:
            yield self._pieces.popleft(), batch

    def _deliver(self, batch: Any) -> Any:
        return to_device(batch, self._device)


def _bounded(micro_batch: int | None, samples: int) -> list[int]:
    return micro.sizes(samples, micro_batch or samples)


def _parts(samples: list[Any], cut: Callable[[int], list[int]]) -> Iterator[tuple[list[Any], bool, bool]]:
    """A share's micro-batches, and whether each is the first and the last. No samples make one without any."""
    ends = list(accumulate(cut(len(samples)) if samples else [0]))
    for start, end in zip([0, *ends], ends, strict=False):
        yield samples[start:end], start == 0, end == ends[-1]


def _mixed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


class _Feed:
    """The DataLoader's batch sampler: asks the loader for index lists."""

    def __init__(self, loader: TrainLoader) -> None:
        # Weak: a DataLoader in a cycle is left to the garbage collector, and waits seconds for each of its workers.
        self._loader = weakref.proxy(loader)

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.pull()

    def __len__(self) -> int:
        return len(self._loader)


class Collate:
    """The user's collate function; no samples make no batch."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self.function = function

    def __call__(self, samples: list[Any]) -> Any:
        return self.function(samples) if samples else None


class _Batched:
    """A dataset that fetches whole batches by itself, asked for none of them politely."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.dataset.__getitems__(indices) if indices else []

    def __len__(self) -> int:
        return len(self.dataset)


def _data_loader(feed: Any, options: dict[str, Any]) -> DataLoader[Any]:
    dataset = options.pop("dataset")
    collate = options.pop("collate_fn", None) or default_collate
    if hasattr(dataset, "__getitems__"):
        dataset = _Batched(dataset)
    return DataLoader(dataset, batch_sampler=feed, collate_fn=Collate(collate), **options)


class StreamLoader(TrainLoader):
    """Batches from an IterableDataset: every rank reads the stream and keeps its share of each global batch.

    Exactly once, provided that the stream is the same on all ranks and read by one process: the dataset must not
    shard itself by rank or by DataLoader worker, and num_workers may be 0 or 1.
    """

    def __init__(
        self,
        engine: Engine,
        batches: tuple[int, ...],
        minimum: int,
        smallest: int,
        last: str,
        micro_batch: int | None,
        device: torch.device,
        **options: Any,
    ) -> None:
        if options.get("num_workers", 0) > 1:
            raise InfeasibleError(
                f"an IterableDataset with num_workers={options['num_workers']} cannot be read exactly once: several "
                f"processes would each read the whole stream: use num_workers=0 or 1, or a map-style dataset"
            )
        self._collate = options.pop("collate_fn", None) or default_collate
        self._minimum, self._smallest, self._last, self._generator = minimum, smallest, last, None
        self._stream: DataLoader[Any] = DataLoader(
            options.pop("dataset"), batch_size=None, collate_fn=_as_is, **options
        )
        # The sampler only keeps the position and the plans; the stream has no known size.
        Source.__init__(self, engine, Sampler(2**62, batches, minimum=minimum, shuffle=False), 0)
        self._begin(micro_batch, device)

    def __len__(self) -> int:
        raise TypeError("an IterableDataset has no length")

    @property
    def steps(self) -> None:
        return None

    def restore(self, state: Mapping[str, int], epoch: int | None = None) -> None:
        self.sampler.load_state_dict(state)
        self._fresh = True

    @property
    def dataloader(self) -> Any:
        return self._batches()

    def close(self) -> None:
        self._stream._iterator = None

    def _batches(self) -> Iterator[Any]:
        samples = iter(self._stream)
        for _ in range(self.sampler.offset):
            next(samples, None)
        step, offset = self.sampler.step, self.sampler.offset
        ahead: deque[Any] = deque()  # so many that the end of the stream is seen in time
        while True:
            cut = Cut(self.sampler.batches_at(step), self._minimum, self._last)
            ahead.extend(islice(samples, (2 if self._last == "merge" else 1) * cut.total - len(ahead)))
            count = cut.take(len(ahead))
            if not count:
                return
            if count < self._smallest:
                raise UsageError(too_small(count, self._smallest, "the last step of the stream"))
            sizes, taken = cut.sizes(count), [ahead.popleft() for _ in range(count)]
            rank = self._engine.rank
            start = sum(sizes[:rank])
            mine = taken[start : start + sizes[rank]]
            share = Share(step, self.sampler.epoch, offset, tuple(sizes), NONE, cut.active)
            if rank in cut.active and not mine:
                self._pieces.append(Piece(share, 0, True, True, self._smallest))
                yield self._collate(taken[: self._smallest])
            for part, first, last in _parts(mine, self.cut) if mine or rank not in cut.active else ():
                self._pieces.append(Piece(share, len(part), first, last))
                yield self._collate(part) if part else None
            step, offset = step + 1, share.end


def _as_is(sample: Any) -> Any:
    return sample


def take_over(loader: DataLoader[Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset and options of an existing DataLoader, as Accelerate takes them over."""
    sampler = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is None:
        raise InfeasibleError(
            "the DataLoader has batch_size=None: its dataset makes batches by itself, which cannot be cut by speed: "
            "give a dataset of single samples"
        )
    known = isinstance(loader.dataset, IterableDataset) or type(sampler) in (RandomSampler, SequentialSampler)
    custom_batches = (
        loader.batch_sampler is not None and type(loader.batch_sampler) is not torch.utils.data.BatchSampler
    )
    replacement = getattr(sampler, "replacement", False) or getattr(sampler, "_num_samples", None) is not None
    if not known or custom_batches or replacement:
        odd = loader.batch_sampler if custom_batches else sampler
        raise InfeasibleError(
            f"the DataLoader's {type(odd).__name__} cannot be kept: OmniLearn draws every sample exactly once per "
            f"epoch and cuts batches by itself: pass the dataset with shuffle=True or False instead"
        )
    options: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "persistent_workers": loader.persistent_workers,
        "shuffle": isinstance(sampler, RandomSampler),
        "drop_last": bool(loader.drop_last),
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    return loader.dataset, options


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on ``device``; tuples, lists and mappings are kept as they are.

    To a card it is copied on a stream of its own: while the card is still busy with the step before.
    """
    if device.type != "cuda":
        return _moved(batch, device, None)
    current, side = torch.cuda.current_stream(device), side_stream(device)
    with torch.cuda.stream(side):
        moved = _moved(batch, device, current)
    current.wait_stream(side)
    return moved


@lru_cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which batches are copied to a card."""
    return torch.cuda.Stream(device)


def _moved(batch: Any, device: torch.device, user: torch.cuda.Stream | None) -> Any:
    """``user`` is the stream that will work with the batch, where that is another than the current one."""
    if isinstance(batch, torch.Tensor):
        if batch.device == device:
            return batch
        moved = batch.to(device, non_blocking=True)
        if user is not None:
            moved.record_stream(user)  # its memory is not given away before that stream is done with it
        return moved
    if device.type == "cpu" or isinstance(batch, (str, bytes)):
        return batch
    if isinstance(batch, Mapping):
        parts = {key: _moved(value, device, user) for key, value in batch.items()}
        try:
            return type(batch)(parts)  # type: ignore[call-arg]
        except TypeError:
            return parts
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device, user) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_moved(value, device, user) for value in batch)
    if not hasattr(batch, "to"):
        return batch
    with torch.cuda.stream(user):  # where it is used: what is inside cannot be told of another stream
        return batch.to(device)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers on the CPU begin with this seed; afterwards they are what they were."""
    with compare.numbers(seed), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def last_of(options: dict[str, Any]) -> str:
    """What becomes of the rest of an epoch, by ``last`` or DataLoader's ``drop_last``."""
    last, drop = options.pop("last", None), options.pop("drop_last", False)
    if last is not None and drop and last != "drop":
        raise UsageError(f"loader() got drop_last=True and last={last!r}: give one of them")
    return "drop" if drop else last or "keep"


def check_options(options: dict[str, Any], train: bool) -> None:
    """Refuse keywords that nobody knows, and those of DataLoader that contradict what OmniLearn does."""
    known = [*inspect.signature(DataLoader.__init__).parameters][2:] + ["last", "check_data"] * train
    for name in options:
        if name not in known:
            raise UsageError(f"loader() has no option {name!r}{meant(name, [*known, 'train'])}")
    if not train and options.pop("drop_last", False):
        raise UsageError("loader(train=False) takes no drop_last: every sample is evaluated once")
    for name, why in {
        "batch_size": "the batch of each worker is found: give OmniLearn(global_batch=…)",
        "sampler": "every sample is drawn exactly once per epoch: use shuffle=True or False",
        "batch_sampler": "batches are cut by OmniLearn: use shuffle=True or False",
    }.items():
        if options.get(name) is not None and (train or name != "batch_size"):
            raise UsageError(f"loader() takes no {name}: {why}")
