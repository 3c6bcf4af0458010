"""The ways of training that benchmarks compare, as one worker runs them: plain DDP with any fixed split, and OmniLearn.

A contestant is set up once and then trains in blocks of steps, so that contestants can take turns in the same
processes. It says when each step ended and what this worker did in it; comparing is left to the benchmarks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from omnilearn.bench.block import Block
from omnilearn.bench.workloads import Pool, Workload
from omnilearn.control import Policy
from omnilearn.pytorch import OmniLearn
from omnilearn.pytorch.clock import Clock
from omnilearn.pytorch.gauge import gauge_of
from omnilearn.pytorch.memory import is_out_of_memory

TIMEOUT = 120.0
"""Seconds after which a peer that does not answer ends the benchmark."""


@dataclass
class Job:
    """What is trained, where, and by whom: the same for all contestants of a session."""

    workload: Workload
    pool: Pool
    device: torch.device
    rank: int
    size: int
    watch: bool  # whether to measure busy and waiting time too
    follow: Callable[[], None] = lambda: None  # called before each step: as many threads as the level has now

    def data(self, samples: int) -> Pool:
        """So many samples, out of those that are held."""
        return Pool(self.pool.x, self.pool.y, samples)

    def start(self, seed: int = 0) -> tuple[Any, Any]:
        """A fresh model and optimizer, the same whenever this is called."""
        torch.manual_seed(seed)
        model = self.workload.model().to(self.device)
        return model, self.workload.optimizer(model.parameters())

    def to_device(self, batch: Any) -> list[torch.Tensor]:
        return [part.to(self.device, non_blocking=True) for part in batch]


class _Watch:
    """Busy and waiting time of each step, by the engine's own clock; or nothing, where that would disturb."""

    def __init__(self, job: Job, block: Block) -> None:
        # On CUDA a step's timing is there only some steps later; the benchmarks do without it.
        self._clock = Clock(job.device) if job.watch and job.device.type == "cpu" else None
        self._block = block
        self._synchronise = job.watch and job.device.type == "cuda"

    def now(self) -> float:
        """The time, once the card has done what it was told to."""
        if self._synchronise:
            torch.cuda.synchronize()
        return time.perf_counter()

    def backward(self, loss: torch.Tensor) -> None:
        if self._clock is not None:
            self._clock.watch(loss)

    def reduced(self, step: int) -> None:
        if self._clock is None:
            return
        self._clock.reduced()
        timing = self._clock.take()
        if timing is not None:
            self._block.busy[step], self._block.wait[step] = timing.busy, timing.wait


class Plain:
    """DistributedDataParallel by hand: a fixed split over some of the workers, weighted where it is unequal.

    With equal batches it is what everybody does: DDP, DistributedSampler, nothing else. A split over one worker needs
    no DDP at all. The other workers do nothing.
    """

    def __init__(self, job: Job, *, backend: str = "gloo", weighted: bool = True, seed: int = 0) -> None:
        self._job, self._backend, self._weighted, self._seed = job, backend, weighted, seed
        self.model, self.optimizer = job.start(seed)
        self._groups: dict[tuple[int, ...], Any] = {}
        self._wrapped: Any = None
        self._active: tuple[int, ...] = ()
        self._epoch = self._step = 0
        self._progress = _progress()

    def _wrap(self, active: tuple[int, ...]) -> Any:
        if active == self._active:
            return self._wrapped
        self._wrapped, self._active = None, active  # the old one lets go of the parameters' hooks first
        self.optimizer.zero_grad()
        if len(active) == 1:
            self._wrapped = self.model
            return self.model
        card = [self._job.device.index] if self._job.device.type == "cuda" else None
        self._wrapped = DistributedDataParallel(self.model, device_ids=card, process_group=self._groups[active])
        return self._wrapped

    def _batches(self, batches: tuple[int, ...], steps: int) -> DataLoader[Any]:
        job, total = self._job, sum(batches)
        data = job.data(steps * total)
        if len(set(batches)) == 1:
            sampler: Any = DistributedSampler(data, job.size, job.rank, shuffle=True, seed=self._seed)
            sampler.set_epoch(self._epoch)
            return DataLoader(data, batch_size=batches[0], sampler=sampler)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(self._seed + self._epoch)).tolist()
        first = sum(batches[: job.rank])
        cuts = [order[s * total + first : s * total + first + batches[job.rank]] for s in range(steps)]
        return DataLoader(data, batch_sampler=cuts)

    def block(self, steps: int, batches: tuple[int, ...]) -> Block:
        job, step = self._job, self._step
        self._step, self._epoch = self._step + steps, self._epoch + 1
        active = tuple(k for k, size in enumerate(batches) if size)
        if len(active) > 1 and active not in self._groups:
            # By all ranks: groups that only their members make are named by how many groups each has made before.
            self._groups[active] = dist.new_group(list(active), backend=self._backend)
        if not batches[job.rank]:
            self._wrapped, self._active = None, ()
            return Block(end=time.perf_counter())
        model = self._wrap(active)
        loader = self._batches(batches, steps)
        factor = batches[job.rank] * sum(size > 0 for size in batches) / sum(batches) if self._weighted else 1.0
        block, loss = Block(), None
        watch = _Watch(job, block)
        for batch in loader:
            job.follow()
            x, y = job.to_device(batch)
            loss = job.workload.loss(model, x, y)
            if factor != 1:
                loss = loss * factor
            watch.backward(loss)
            loss.backward()
            watch.reduced(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            block.ends[step], block.samples[step] = watch.now(), len(y)
            step += 1
            self._progress(step)
        return _finish(job, block, loss)


class Omni:
    """OmniLearn as a user has it. A block is an epoch of ``steps`` steps, the same number each time."""

    def __init__(
        self,
        job: Job,
        steps: int,
        policy: str | Policy = "optimal",
        *,
        seed: int = 0,
        clip: float | None = None,
        **options: Any,
    ) -> None:
        self._job, self._steps, self._clip = job, steps, clip
        model, optimizer = job.start(seed)
        if options.get("mode") == "async" and isinstance(optimizer, torch.optim.SGD):
            # The workloads' rates are for the global batch; in asynchronous mode one is for a worker's mean share.
            for group in optimizer.param_groups:
                group["lr"] /= job.size
        settings = {"policy": policy, "seed": seed, "timeout": TIMEOUT, "device": str(job.device), **options}
        self.omni = OmniLearn(job.workload.global_batch, **settings)
        self.model, self.optimizer = self.omni.prepare(model, optimizer)
        self.loader = self.omni.loader(job.data(steps * job.workload.global_batch), shuffle=True, pin_memory=False)
        self.reasons: list[tuple[int, tuple[int, ...], str]] = []
        self.omni.on_plan(lambda plan, step: self.reasons.append((step, plan.batches, plan.reason)))

    def block(self) -> Block:
        block, omni, loss = Block(), self.omni, None
        watch = _Watch(self._job, block)
        for x, y in self.loader:
            self._job.follow()
            step = self.loader.sampler.step
            loss = self._job.workload.loss(self.model, x, y)
            watch.backward(loss)
            omni.backward(loss)
            watch.reduced(step)
            if self._clip is not None:
                omni.clip_grad_norm_(self._clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            block.ends[step], block.samples[step] = watch.now(), block.samples.get(step, 0) + len(y)
        return _finish(self._job, block, loss)

    def close(self) -> None:
        self.omni.close()


class StepOmni(Omni):
    """OmniLearn by ``omni.step``, which survives running out of memory."""

    def block(self) -> Block:
        block, loss = Block(), None
        watch = _Watch(self._job, block)
        for batch in self.loader:
            step = self.loader.sampler.step
            loss = self.omni.step(lambda part: self._job.workload.loss(self.model, *part), batch)
            block.ends[step], block.samples[step] = watch.now(), block.samples.get(step, 0) + len(batch[1])
        return _finish(self._job, block, loss)


class AsyncOmni(Omni):
    """OmniLearn in asynchronous mode. A block is an epoch; steps are this worker's own."""

    def __init__(self, job: Job, steps: int, policy: str | Policy = "optimal", **options: Any) -> None:
        super().__init__(job, steps, policy, mode="async", **options)

    def block(self) -> Block:
        block, loss = Block(), None
        for step, (x, y) in enumerate(self.loader):
            loss = self._job.workload.loss(self.model, x, y)
            self.omni.backward(loss)
            if self._clip is not None:
                self.omni.clip_grad_norm_(self._clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            block.ends[step], block.samples[step] = time.perf_counter(), len(y)
        return _finish(self._job, block, loss)


def _finish(job: Job, block: Block, loss: torch.Tensor | None) -> Block:
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    block.end = time.perf_counter()
    block.loss = None if loss is None else float(loss.detach())
    return block


def _progress() -> Callable[[int], None]:
    """Tells the emulation how far the training is, as OmniLearn's engine does."""
    path = os.environ.get("OMNILEARN_PROGRESS")
    if not path:
        return lambda step: None
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    return lambda step: _write(file, step)


def _write(file: int, step: int) -> None:
    os.pwrite(file, step.to_bytes(8, "little"), 0)


def pass_needs(job: Job, size: int) -> int:
    """Bytes that forward and backward pass over so many samples take at their peak, beside what was in use."""
    gauge = gauge_of(job.device)
    model, _ = job.start()
    taken = 0
    for _ in range(2):  # in the first one libraries take something for themselves
        model.zero_grad()
        gauge.reset()
        before = gauge.used()
        _pass(job, model, size)
        taken = gauge.peak() - before
    return taken


def largest_pass(job: Job, most: int, least: int) -> int:
    """The largest batch up to ``most`` that really runs within this worker's memory (0: not even the least)."""
    model, _ = job.start()
    fits, too_much = 0, most + 1
    while too_much - max(fits, least - 1) > 1:
        size = least if not fits else (fits + too_much) // 2
        try:
            _pass(job, model, size)
            fits = size
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            too_much = size
        model.zero_grad()
        gauge_of(job.device).release()
    return fits


def _pass(job: Job, model: Any, size: int) -> None:
    at = torch.arange(size) % len(job.pool.x)
    x, y = job.to_device((job.pool.x[at], job.pool.y[at]))
    job.workload.loss(model, x, y).backward()


def local_steps(job: Job, sizes: list[int], repeats: int, seconds: float) -> Iterator[tuple[int, float]]:
    """This worker alone: seconds per step at each batch size, reductions left out.

    Every size is repeated for at least so long, so that workers timed side by side compute at the same time.
    """
    model, optimizer = job.start()
    for size in sizes:
        at = torch.arange(size) % len(job.pool.x)
        x, y = job.to_device((job.pool.x[at], job.pool.y[at]))
        begin, count = time.perf_counter(), 0
        while count < repeats + 1 or time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            job.workload.loss(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if job.device.type == "cuda":
                torch.cuda.synchronize(job.device)
            if count:
                yield size, time.perf_counter() - start
            count += 1
