"""``OmniLearn``: the object the user's script talks to. Resolves options; the engine does the work."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from omnilearn.control import Policy
from omnilearn.data import Sampler, compare
from omnilearn.engine.facade import Facade, check_mode, check_names, check_save, check_timeout
from omnilearn.errors import InfeasibleError, OmniLearnError, UsageError
from omnilearn.pytorch import attempt, checkpoint, checks
from omnilearn.pytorch import model as models
from omnilearn.pytorch.engine import SyncEngine
from omnilearn.pytorch.evaluate import EvalLoader
from omnilearn.pytorch.loader import StreamLoader, TrainLoader, check_options, last_of, seeded, take_over
from omnilearn.pytorch.model import smallest_batch
from omnilearn.pytorch.world import World

log = logging.getLogger("omnilearn")

AT_EXIT = timedelta(seconds=60)
"""How long the end of a script waits for the others."""


class OmniLearn(Facade):
    """Data-parallel training in which each worker's share of the global batch follows its speed.

    ::

        omni = OmniLearn(global_batch=512)
        model, optimizer = omni.prepare(model, optimizer)
        for x, y in omni.loader(train_set, shuffle=True):
            loss = F.cross_entropy(model(x), y)
            omni.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    ``global_batch``: samples per step, all workers together. It stays the same, so a learning rate chosen for it holds.
    ``policy``: "optimal", "proportional", "static", "uniform", or an object with ``start``, ``update`` and ``restore``
    (``omnilearn.control.Policy``).
    ``min_batch``, ``max_batch``: bounds of an active worker's share (found: 2 with BatchNorm, else 1; no maximum).
    ``multiple_of``: shares are multiples of it. ``park``: whether a worker that slows the others down may sit out.
    ``micro_batch``: a share above it is computed in several passes, reduced once (gradient accumulation). What memory
    does not hold is so without it: the bound is learned (docs/memory.md).
    ``nonfinite``: "raise" or "skip" a step whose gradient is not finite. ``device``: found; or "cpu", "cuda:1".
    ``compress``: "bf16" sends gradients in half the bytes, for slow links; not exact any more (docs/exactness.md).
    ``log_dir``: where events go (docs/events.md); by default where ``omnilearn run`` says, else nowhere.
    ``seed``: of the order of samples. ``timeout``: of every wait for a peer, in seconds.

    ``mode="async"``: nobody waits for anybody, a server applies each gradient as it comes (docs/async.md).
    ``staleness``: what becomes of late gradients, "apply", "scale", "discard" or "bounded", the last two beyond
    ``threshold`` (found: twice the number of workers). ``lr_scaling``: how the learning rate of an update follows its
    batch, "linear", "capped", "sqrt" or "none". ``lease_timeout``: seconds of silence after which a worker's samples
    are given to others. ``join``: the address of a running server, to join it.
    """

    backend = "pytorch"
    _checkpoint_file = checkpoint.FILE

    def __new__(cls, *args: Any, mode: str = "sync", **options: Any) -> OmniLearn:
        check_names(OmniLearn.__init__, options, "OmniLearn()")
        if cls is OmniLearn and mode == "async":
            from omnilearn.pytorch.asynchronous.omni import AsyncOmniLearn

            cls = AsyncOmniLearn
        return super().__new__(cls)

    def __init__(
        self,
        global_batch: int,
        *,
        mode: str = "sync",
        policy: str | Policy = "optimal",
        min_batch: int | None = None,
        max_batch: int | None = None,
        multiple_of: int = 1,
        park: bool | None = None,
        micro_batch: int | None = None,
        nonfinite: str = "raise",
        compress: str | None = None,
        device: str | torch.device | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        seed: int = 0,
        timeout: float = 1800.0,
        staleness: str = "apply",
        threshold: int | None = None,
        lr_scaling: str | None = None,
        lease_timeout: float = 60.0,
        join: str | None = None,
    ) -> None:
        check_timeout(timeout)
        self._world = self._meet_world(device, timedelta(seconds=timeout), join)
        with self._world.alike():
            check_mode(mode, staleness, threshold, lr_scaling, park)
            checks.options(mode, compress, lease_timeout, join)
            kept = self._take_options(
                global_batch, policy, min_batch=min_batch, max_batch=max_batch, multiple_of=multiple_of, park=park,
                micro_batch=micro_batch, nonfinite=nonfinite, seed=seed,
            )  # fmt: skip
        kept["compress"] = self._compress = compress
        if mode == "async":
            kept |= {"staleness": staleness, "threshold": threshold, "lr_scaling": lr_scaling or "linear",
                     "lease_timeout": lease_timeout}  # fmt: skip
        self._open(mode, kept, log_dir)
        self._engine: SyncEngine | None = None

    def _meet_world(self, device: str | torch.device | None, timeout: timedelta, join: str | None) -> World:
        return World(device, timeout)

    # Readable state

    @property
    def device(self) -> torch.device:
        return self._world.device

    @property
    def accumulating(self) -> bool:
        """True while more micro-batches of the current step are to come (Accelerate: ``not sync_gradients``)."""
        return self._engine is not None and self._engine.accumulating

    # Setting up

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *others: Any,
        find_unused_parameters: bool | None = None,
    ) -> Any:
        """The model and optimizer to use in the loop, and what else has a state: schedulers, a GradScaler.

        Call it once, on all ranks. The model goes to this worker's device and starts with rank 0's weights everywhere.
        The others are the same objects; they act once per step, are saved, and follow a worker that was parked.
        Parameters without a gradient are found in the first step; pass
        ``find_unused_parameters=True`` if which ones are used changes from step to step.
        """
        if self._engine is not None:
            raise UsageError("prepare() was called before: one OmniLearn object trains one model")
        with self._world.alike():
            checks.prepared(model, optimizer, others, self._micro_batch if self.world_size > 1 else None)
            model = models.own(model)
            model.to(self.device)
            problem = self._found_problem(smallest_batch(model))
        self._engine = SyncEngine(
            self._world,
            self._policy,
            problem,
            model,
            optimizer,
            others,
            nonfinite=self._nonfinite,
            compress=self._compress,
            find_unused_parameters=find_unused_parameters,
            on_plan=self._announce,
            events=self._events,
        )
        models.name_module(model)
        atexit.register(self._at_exit)
        return (model, optimizer, *others)

    def loader(self, data: Any, *, train: bool = True, shuffle: bool | None = None, **options: Any) -> Any:
        """Batches of ``data`` for this worker: a dataset, with DataLoader's keywords, or a DataLoader to take over.

        Training: each global batch is cut by the plan in force. ``train=False``: the samples are split by speed over
        those who evaluate, each one once; ``batch_size`` may be given.
        """
        engine = self._prepared("loader()")
        if isinstance(data, DataLoader):
            inherited_batch = data.batch_size
            data, inherited = take_over(data)
            options = {**inherited, **options}
            if not train:
                options.setdefault("batch_size", inherited_batch)
            shuffle = options.pop("shuffle") if shuffle is None else shuffle
            options.pop("shuffle", None)
        if not train:
            check_options(options, train=False)
            return EvalLoader(engine, data, self.device, self.global_batch, **options)
        engine.settle("loader()")
        check_data = options.pop("check_data", True)
        with self._world.alike():
            check_options(options, train=True)
            loader = self._train_loader(engine, data, bool(shuffle), options)
        size = None if isinstance(loader, StreamLoader) else loader.sampler.size
        self._adopt(loader, size, shuffle)
        if check_data and size is not None and self.world_size > 1:
            hosts = [worker.host for worker in self._world.resources]
            compare.same_samples(compare.fingerprints(data, size, seeded), self._world.gather, hosts)
        return loader

    def _train_loader(self, engine: SyncEngine, data: Any, shuffle: bool, options: dict[str, Any]) -> TrainLoader:
        minimum, batches = int(engine.planner.problem.minimum[0]), engine.planner.plan.batches
        smallest, last = smallest_batch(engine.module), last_of(options)
        if isinstance(data, IterableDataset):
            if shuffle:
                raise InfeasibleError("an IterableDataset cannot be shuffled by the loader: shuffle inside the dataset")
            return StreamLoader(
                engine, batches, minimum, smallest, last, self._micro_batch, self.device, dataset=data, **options
            )
        try:
            size = len(data)
        except TypeError as error:
            raise UsageError(
                f"{type(data).__name__} has no length: give a map-style dataset or an IterableDataset"
            ) from error
        if size < self.global_batch and self._world.is_main:
            log.warning("global_batch=%d is more than the %d samples of the data set: each epoch is one step of %d",
                        self.global_batch, size, size)  # fmt: skip
        sampler = Sampler(size, batches, minimum=minimum, shuffle=shuffle, seed=self.seed, last=last, smallest=smallest)
        options.setdefault("pin_memory", self.device.type == "cuda")
        return TrainLoader(engine, sampler, self._micro_batch, self.device, dataset=data, **options)

    # The loop

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Backward pass and reduction. ``loss`` is the mean over this worker's batch.

        ``weight``: what the mean is over, where that is not samples: the number of tokens, say. The gradient is then
        the mean over all workers' tokens.
        """
        self._prepared("backward()").backward(loss, weight)

    def step(
        self,
        compute_loss: Callable[[Any], torch.Tensor],
        batch: Any,
        *,
        weight: float | Callable[[Any], float] | None = None,
    ) -> torch.Tensor:
        """Forward, backward, reduction, optimizer step and zeroing in one. Returns this worker's loss, detached.

        Running out of memory is survived: the same samples are computed again in smaller parts of ``batch``, which
        ``compute_loss`` gets instead, to the same gradient. ``weight`` is as in ``backward``; give it as a function of
        a (part of a) batch, so that a batch can be cut.
        """
        engine = self._prepared("step()")
        loss = attempt.compute(engine, compute_loss, batch, weight)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor | None:
        """torch's clip_grad_norm_ on the whole step's gradient; does nothing while micro-batches are outstanding.

        With a GradScaler, unscale first, as in plain PyTorch.
        """
        engine = self._prepared("clip_grad_norm_()")
        if engine.accumulating:
            return None
        return nn.utils.clip_grad_norm_(engine.module.parameters(), max_norm, norm_type)

    def mean(self, value: Any, weight: float | None = None) -> Any:
        """The mean of ``value`` over the workers, weighted; the same on all of them.

        ``weight`` is by default the size of the batch under way inside the training loop, and 1 outside of it. A value
        with weight 0 does not count, whatever it is. Inside the training loop it is over the workers that take part in
        the step, outside over all. Numbers and one-element tensors give a float.
        """
        engine = self._prepared("mean()")
        engine.settle("mean()")
        if weight is None:
            weight = float(engine.piece.samples) if engine.piece is not None else 1.0
        tensor = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
        total = torch.cat(
            [(tensor * weight if weight else torch.zeros_like(tensor)).reshape(-1), torch.tensor([float(weight)])]
        )
        total = self._total(total, f"mean() of {'x'.join(map(str, tensor.shape)) or 'a number'}")
        if total[-1] == 0:
            raise UsageError("mean() over workers whose weights are all 0")
        result = total[:-1] / total[-1]
        return result.item() if tensor.numel() == 1 else result.reshape(tensor.shape)

    def _total(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """The sum over those who run the script now, added up in the order of ranks."""
        engine = self._prepared(what)
        parts = engine.membership.meet(self._world.place(what), engine.participants, values.numpy().tobytes())
        return torch.stack([torch.frombuffer(bytearray(part), dtype=values.dtype) for part in parts]).sum(dim=0)

    def agree(self, condition: Any, *, how: str = "any") -> bool:
        """Whether ``condition`` holds on any worker (``how="all"``: on all of them): the same answer on all.

        The way to stop together: ``if omni.agree(loss < 0.1): break``. Inside the loop it is over the workers that
        take part in the step; call it in the same step on all of them.
        """
        if how not in ("any", "all"):
            raise UsageError(f"agree() takes how='any' or how='all', got {how!r}")
        engine = self._prepared("agree()")
        engine.settle("agree()")
        place = self._world.place("agree()")
        answers = engine.membership.meet(place, engine.participants, bytes([bool(condition)]))
        return (any if how == "any" else all)(answer != b"\0" for answer in answers)

    # Checkpoints

    def save(self, folder: str | os.PathLike[str], *, every: int | None = None, **extra: Any) -> None:
        """Write a checkpoint: model, optimizer, scheduler, data position, controller, random numbers, and ``extra``.

        Call it on all ranks: between epochs rank 0 writes, inside the loop the first rank that takes part (use storage
        that all machines see where parking may happen). A crash while saving never harms the checkpoint before it.
        ``every``: in the loop, after ``optimizer.step()``: save after every so many steps of the job, else do nothing.
        """
        engine = self._prepared("save()")
        check_save(every, extra)
        if not self._is_due(every):
            return
        if engine.accumulating or (engine.piece is not None and engine._backwards and not engine.done):
            raise UsageError("save() in the middle of a step: call it after the last micro-batch's optimizer.step()")
        engine.settle("save()")
        workers, place = engine.participants, self._world.place("save()")
        engine.membership.meet(place, workers)
        engine.share_buffers()
        group = engine.membership.talk(workers)
        mine = checkpoint.random_state(self.device)
        states = self._world.collect(mine, workers[0], group, "save()", workers)
        error = ""
        if self.rank == workers[0]:
            state = {
                **engine.pack(),
                **self._position,
                "policy": self._policy_facts(),
                "random": {int(rank): state for rank, state in zip(workers, states, strict=True)},
                "global_batch": self.global_batch,
                "extra": extra,
            }
            try:
                checkpoint.write(folder, state)
            except Exception as failure:
                error = f"rank {self.rank} cannot write a checkpoint to {folder}: {failure}"
        for message in filter(None, engine.membership.meet(place, workers, error.encode())):
            raise UsageError(message.decode())
        if self.rank == workers[0]:
            self._tell_checkpoint("saved", folder)
        # A continued run begins with a new wrapper, whose first step adds up in another order: this run does the same.
        engine.wrap()
        engine.restart_clock()

    def _last_step(self) -> tuple[int, int]:
        engine = self._prepared("save()")
        if engine.source is None:
            raise self._no_loop()
        return engine.stepped if engine.stepped[1] == self.global_step and not engine.accumulating else (0, 0)

    def load(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Continue from a checkpoint; call it on all ranks after ``prepare``. Returns what ``save`` got as extra.

        Rank 0 reads the file and sends it to the others. On the same number of workers the run goes on bit for bit
        (with a policy whose plans do not depend on timings); on another number it goes on with the next samples.
        """
        engine = self._between_loops("load()")
        state = checkpoint.receive(self._world, folder)
        try:
            engine.unpack(state)
            engine.wrap()
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(f"the checkpoint in {folder} does not fit this model and optimizer: {error}") from error
        self._resume(state["policy"], state["sampler"], state.get("samplers"))
        engine.stepped = engine.step, engine.step
        if self._world.is_main:
            self._tell_checkpoint("loaded", folder, engine.step)
        if self.rank in state["random"]:
            checkpoint.restore_random_state(state["random"][self.rank], self.device)
        return dict(state["extra"])

    # The end

    def _let_go(self) -> None:
        atexit.unregister(self._at_exit)
        self._tracking.close()
        for loader in self._alive:
            loader.close()
        if self._engine is not None:
            self._abandon()
        self._world.close()

    def _finish(self) -> None:
        assert self._engine is not None
        if self._world.broken:
            return
        self._engine.settle("the end of the script, or close()")
        self._engine.planner.drain()
        with contextlib.suppress(OmniLearnError, RuntimeError):  # who parked may be behind, and needs what it was sent
            self._engine.membership.flush()
            self._world.flush(self._world.timeout)

    def _abandon(self) -> None:
        """Leave the others, whatever they do."""
        assert self._engine is not None
        self._engine.forget_loop()
        self._engine.end_threads()
        self._engine.membership.close()
        models.forget_module(self._engine.module)

    def _at_exit(self) -> None:
        """A script that does not close: the parked may still wait to hear that the others left the loop."""
        uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # alone, nobody else has noted it
        if not self._world.failed and uncaught is not None:
            self._world.report_failure(uncaught)
        if not self._world.failed:
            self._world.timeout = min(self._world.timeout, AT_EXIT)
            try:
                self.close()
            except (OmniLearnError, RuntimeError) as error:
                print(f"omnilearn: rank {self.rank}: {error}", file=sys.stderr, flush=True)
                self._world.report_failure(error)
        if self._engine is not None:
            self._engine.end_threads()
        self._world.end_threads()
        self._events.write("end", ok=False, error=self._world.error)
