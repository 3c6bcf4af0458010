"""The synchronous engine: a step is done together, by whoever takes part, with exact gradients.

The gradient of a step is ``Σ w_k·g_k / Σ w_k`` over the workers k that take part, g_k being the gradient of worker k's
mean loss and w_k the samples (or the user's weight) really in its batch: what one machine would compute on the whole
global batch. DistributedDataParallel averages over n workers, so each loss is scaled by ``w_k·n / Σ w_k`` before its
backward pass; where the weights' sum is not known beforehand it is reduced alongside and divided out afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from omnilearn.control import Plan, Policy, Problem
from omnilearn.data import Share
from omnilearn.engine.planner import Planner, Stop
from omnilearn.engine.progress import Progress
from omnilearn.errors import OmniLearnError, UsageError
from omnilearn.observe import EventLog
from omnilearn.pytorch import reduction
from omnilearn.pytorch.clock import Clock, later
from omnilearn.pytorch.finite import Finite
from omnilearn.pytorch.loader import Piece, StreamLoader, TrainLoader
from omnilearn.pytorch.membership import Membership, Workers
from omnilearn.pytorch.memory import Memory, OutOfMemoryError
from omnilearn.pytorch.model import OmniModel, fingerprint, gate, smallest_batch
from omnilearn.pytorch.shortage import Shortage
from omnilearn.pytorch.world import World

log = logging.getLogger("omnilearn")


class NonFiniteError(OmniLearnError, ArithmeticError):
    """The gradient of a step is not finite. Raised on all ranks alike."""


class SyncEngine:
    """Drives the loop from inside ``loader``, ``backward`` and ``optimizer.step``."""

    def __init__(
        self,
        world: World,
        policy: Policy,
        problem: Problem,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        others: tuple[Any, ...],
        *,
        nonfinite: str,
        compress: str | None,
        find_unused_parameters: bool | None,
        on_plan: Callable[[Plan, int], None],
        events: EventLog | None = None,
    ) -> None:
        self.world, self.rank = world, world.rank
        self.module, self.optimizer, self.others = module, optimizer, others
        self.clock = Clock(world.device)
        self.events = events or EventLog(None, world.rank)
        self.memory = Memory(
            world.device,
            most=None if problem.micro is None else int(problem.micro[self.rank]),
            minimum=smallest_batch(module),
            fixed=world.size > 1 and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()),
        )
        domain = self.memory.domain
        self.memory.sharers = world.gather(domain).count(domain)
        self.shortage = Shortage(self.rank, self.memory, self.events)
        self.planner = Planner(world, self.clock, policy, problem, on_plan, self.events, self.memory)
        world.agree("models", fingerprint(module))
        world.agree("models", {"the order of parameters": [name for name, _ in module.named_parameters()]})
        self._broadcast()
        self._compress = None if compress is None else reduction.COMPRESSED[compress]
        self.membership = Membership(world, module, self.pack, self.unpack, self._compress)
        self.membership.find_unused = find_unused_parameters
        self.model = OmniModel(module, self.membership)
        self.nonfinite, self.skipped = nonfinite, 0
        self.piece: Piece | None = None  # the micro-batch in the user's hands
        self._broken_off: Piece | None = None  # the one at which a loop was left early
        world.explain = self._explain
        self.loader: TrainLoader | None = None  # the training loop under way
        self.step = 0  # steps done before the loop under way, over all loaders
        self._left: TrainLoader | None = None  # a loop the user broke out of, which the parked do not know yet
        self._backwards = 0  # of the current micro-batch
        self._complete = False  # the gradient of the whole step is there
        self.weight = 0.0  # of this step's micro-batches so far, where the user gives weights
        self._own_weights = False
        self._reduced: tuple[torch.Tensor, Any] | None = None  # the sum of all weights, under way
        self._check = Finite(module, every_time=nonfinite == "skip")
        self._progress = Progress()
        self._told: torch.Tensor | None = None  # the loss for the events
        self._asked = self._data = 0.0  # when samples were last asked for; seconds this step waited for them
        optimizer._step_supports_amp_scaling = False  # a GradScaler decides before a step
        gate(optimizer, "step", self._may_step, self._stepped)
        gate(optimizer, "zero_grad", lambda: not self.accumulating, self._stepped)
        for other in others:
            for method in ("step", "unscale_", "update"):  # of schedulers and GradScalers
                if hasattr(other, method):
                    gate(other, method, lambda: not self.accumulating, self._stepped if method == "update" else None)

    # What the loader calls

    def begin_epoch(self, loader: TrainLoader) -> None:
        if self.loader is not None:
            raise UsageError("one training loop at a time: finish or break the loop under way first")
        self.settle()
        self.loader, loader.cut = loader, self.memory.cut
        self.clock.restart()
        if loader.sampler.step != self.step:  # another loader was in use meanwhile
            loader.sampler.load_state_dict(loader.sampler.state_dict() | {"step": self.step})
        loader.sampler.schedule(self.planner.plan.batches, loader.sampler.step)
        if self.world.is_main and self.events:
            steps = None if isinstance(loader, StreamLoader) else len(loader)
            self.events.write("epoch", epoch=loader.sampler.epoch, step=loader.sampler.step, steps=steps)

    def begin_step(self, loader: TrainLoader) -> bool:
        idle = bool(self.membership.active) and not self.membership.takes_part
        goes_on = self._goes_on(loader, self.planner.tick(loader.sampler, loader.horizon, idle))
        self._data, self._asked = 0.0, time.perf_counter()
        return goes_on

    def enter(self, loader: TrainLoader, share: Share) -> bool:
        self._data = time.perf_counter() - self._asked
        active = tuple(k for k, size in enumerate(share.sizes) if size)
        if active == self.membership.active:
            return True
        if not self._all_here(loader):
            return False
        self.membership.enter(active)
        self.clock.restart()
        return True

    def _all_here(self, loader: TrainLoader) -> bool:
        """Whether the loop goes on. The parked run ahead, and must not do alone what they do with the others."""
        if not self.membership.parked:
            return True
        return self._goes_on(loader, self.planner.confirm(loader.sampler, loader.horizon))

    def _goes_on(self, loader: TrainLoader, stop: Stop | None) -> bool:
        if stop is not None:
            position = loader.sampler.state_dict() | {"step": stop.step, "offset": stop.offset}
            loader.sampler.load_state_dict(position)
            self._end_loop()
            self._share_with_parked()
        return stop is None

    def sit_out(self, loader: TrainLoader, share: Share) -> None:
        self.planner.record(share.sizes, took_part=False)
        loader.sampler.consumed(share)

    def hand_out(self, loader: TrainLoader, piece: Piece) -> None:
        self.piece, self._backwards = piece, 0
        if piece.first:
            self._complete, self.weight, self._own_weights = False, 0.0, False
            if not piece.last:
                self.shortage.cut(piece)
        else:
            self._data += time.perf_counter() - self._asked
        self.reduce_with_next(piece.last)
        if self.shortage.step_cuts is None:  # omni.step does it for each part
            self.memory.begin(piece.samples)
        self.model.used()

    def take_back(self, loader: TrainLoader, piece: Piece) -> None:
        if not self._backwards:
            raise UsageError(
                f"omni.backward(loss) was not called for the last batch (step {piece.share.step}): every batch needs "
                f"it exactly once, or the other workers wait for this one's gradient (omni.step survives running "
                f"out of memory)"
            )
        if piece.last:
            self.planner.record(piece.share.sizes, True, self._data, self._told)
            loader.sampler.consumed(piece.share)
            self._progress.write(piece.share.step + 1)
        self.piece, self._asked = None, time.perf_counter()

    def end_epoch(self, loader: TrainLoader) -> bool:
        if not self._all_here(loader):
            return False
        self._check_late()
        self._end_loop()
        self._share_with_parked()
        return True

    def leave(self, loader: TrainLoader) -> None:
        """The loop was left early: by a break, on all workers that took part, or by an error, on this one alone.

        The two look the same from here, so nothing is said to the others yet.
        """
        if self.piece is not None and self._complete:
            self.planner.record(self.piece.share.sizes, True, self._data, self._told)
            loader.sampler.consumed(self.piece.share)
        self.memory.abandon()
        self._broken_off = self.piece
        self._end_loop()
        self._left = loader

    def settle(self) -> None:
        """After a break, at the next thing all do together: tell the parked, and have all ranks alike again."""
        loader, self._left, self._broken_off = self._left, None, None
        if loader is None:
            return
        self._check_late()
        if self.membership.parked:
            self.planner.leave(loader.sampler, loader.horizon)
        self._share_with_parked()

    def _end_loop(self) -> None:
        if self.loader is not None:
            self.step = self.loader.sampler.step
        self.piece = self.loader = None

    # What the user calls

    @property
    def accumulating(self) -> bool:
        """More micro-batches of the current step are to come."""
        return self.piece is not None and not self.piece.last

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        piece = self.begin_backward()
        self.differentiate(loss, weight, piece.samples, piece.last)
        self.memory.end()
        if piece.last:
            self.conclude()

    def begin_backward(self) -> Piece:
        """The micro-batch under way, whose gradient is now computed."""
        piece = self.piece
        if piece is None:
            raise UsageError("backward() belongs inside the loop over omni.loader(…): there is no batch under way")
        if self._backwards:
            raise UsageError(
                f"backward() was called twice for one batch (step {piece.share.step}): add the losses up and call it "
                f"once; for gradient accumulation use OmniLearn(micro_batch=…)"
            )
        self._backwards += 1
        return piece

    @property
    def overlapping(self) -> bool:
        """Whether the step's last backward pass reduces while it computes: an error in it reaches the others."""
        return self.membership.wrapped is not None

    def reduce_with_next(self, reduce: bool) -> None:
        """What DDP's no_sync() does; it has to be in force during the forward pass already."""
        if self.membership.wrapped is not None:
            self.membership.wrapped.require_backward_grad_sync = reduce

    def differentiate(self, loss: torch.Tensor, weight: float | torch.Tensor | None, samples: int, last: bool) -> float:
        """One backward pass, of the step's last micro-batch or another. Returns the weight that it counts with."""
        assert self.piece is not None
        if loss.dim() and loss.numel() != 1:
            raise UsageError(f"backward() needs the mean loss of the batch, one number, got shape {tuple(loss.shape)}")
        if not loss.requires_grad:
            raise UsageError("the loss does not depend on any trainable parameter: was it computed under no_grad()?")
        if not self.model.used():
            raise UsageError(
                "the loss was not computed with the model that prepare() returned: use that one in the loop"
            )
        self._loss = loss.detach()
        if not self.weight:
            self._own_weights = weight is not None
        elif self._own_weights != (weight is not None):
            raise UsageError("backward() must get a weight for all micro-batches of a step or for none")
        counts = samples if weight is None else float(weight)
        factor = counts * self.membership.count / self.piece.share.total
        scaled = loss if factor == 1 else loss * factor
        if last:
            self._reduced = self._reduce_weight(counts) if self._own_weights and self.overlapping else None
            self.clock.watch(scaled)
        with self.world.naming_the_culprit("reducing gradients") if last else contextlib.nullcontext():
            scaled.backward()
        self.weight += counts
        return counts

    def conclude(self) -> None:
        """After the step's last backward pass: what DistributedDataParallel has not reduced, and the user's weights."""
        assert self.piece is not None
        with self.world.naming_the_culprit("reducing gradients"):
            if self.membership.find_unused is None:
                self._reduce_first()
            if self.membership.compressed is not None:
                self.membership.compressed.finish()
            if self._own_weights:
                reduction.divide(self.module, self._reduced or self._reduce_weight(), self.piece.share.total)
        # Before the clock's mark: it is there when the step's time is read.
        self._told = later(self._loss) if self.events else None
        self.clock.reduced()
        self._complete = True

    def _reduce_weight(self, more: float = 0.0) -> tuple[torch.Tensor, Any]:
        """The sum of all workers' weights, on its way while gradients are computed."""
        total = torch.tensor(self.weight + more, dtype=torch.float64, device=self.world.device)
        group = self.membership.group
        return total, dist.all_reduce(total, group=group, async_op=True) if group is not None else None

    def _reduce_first(self, failure: str | None = None) -> None:
        """The first step's gradients, reduced by hand: it shows which parameters have none, on any worker.

        DistributedDataParallel must know beforehand whether to look for such parameters in every step. Here all hear of
        a ``failure``, too.
        """
        members = self.membership
        used = [p.grad is not None for p in self.module.parameters() if p.requires_grad]
        everywhere = self.world.gather((used, failure), members.talk(members.active)) if members.group else []
        for message in [failure, *(theirs for _, theirs in everywhere)]:
            if message is not None:
                raise OutOfMemoryError(message)
        members.find_unused = not all(all(theirs) for theirs, _ in everywhere or [(used, None)])
        if members.group is not None:
            reduction.by_hand(self.module, [theirs for theirs, _ in everywhere], members.group, self._compress)
            members.wrap()

    def give_up(self, error: OutOfMemoryError) -> NoReturn:
        """Memory does not suffice on this worker: the end, for all. In the first step all raise the same error."""
        if self.membership.find_unused is None:
            self._reduce_first(str(error))
        raise error

    def _explain(self, error: BaseException) -> str:
        return self.shortage.advice(self.piece or self._broken_off, error)

    # The optimizer's gate

    def _may_step(self) -> bool:
        if self.accumulating:
            return False
        if self.piece is not None and not self._backwards:
            raise UsageError(f"optimizer.step() before omni.backward(loss) in step {self.piece.share.step}")
        return self._finite()

    def _stepped(self) -> None:
        if self.piece is not None and self.loader is not None and self._complete:
            self.loader.sampler.consumed(self.piece.share)  # a checkpoint saved now goes on behind this step

    def _finite(self) -> bool:
        """Whether the step may be done, as far as its gradient is concerned: the same on all ranks."""
        if self.piece is None:
            return True
        bad = self._check.check(self.piece.share.step, self._loss)
        return bad is None or self._not_finite(*bad)

    def _check_late(self) -> None:
        if (bad := self._check.outstanding()) is not None:
            self._not_finite(*bad)

    def _not_finite(self, step: int, loss: torch.Tensor) -> bool:
        """Raise, or say that the step is left out: False."""
        group = self.membership.talk(self.membership.active)
        losses = self.world.gather(float(loss), group) if group is not None else [float(loss)]
        told = ", ".join(f"rank {rank}: {loss:g}" for rank, loss in zip(self.membership.active, losses, strict=True))
        if self.rank == self.membership.active[0]:
            self.events.write("fault", step=step, what="non-finite gradient", then=self.nonfinite, detail=told)
        if self.nonfinite == "raise":
            raise NonFiniteError(
                f"the gradient of step {step} is not finite (losses: {told}): lower the learning rate, clip gradients, "
                f"or leave such steps out with OmniLearn(nonfinite='skip')"
            )
        self.skipped += 1
        log.warning("step %d left out: its gradient is not finite (losses: %s)", step, told)
        return False

    # State

    def participants(self) -> Workers:
        """Who runs the user's code now: those who take part in the step under way, outside of the loop everybody."""
        return self.membership.active if self.loader is not None else self.membership.everybody

    def pack(self) -> dict[str, Any]:
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "others": [other.state_dict() for other in self.others],
            "unused": self.membership.find_unused,
        }

    def unpack(self, state: dict[str, Any]) -> None:
        if len(state["others"]) != len(self.others):
            raise ValueError(f"{len(state['others'])} objects were saved beside model and optimizer (schedulers, …), "
                             f"prepare() got {len(self.others)}")  # fmt: skip
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for other, saved in zip(self.others, state["others"], strict=True):
            other.load_state_dict(saved)
        self.membership.find_unused = state["unused"]

    def _broadcast(self) -> None:
        """Start with rank 0's parameters and buffers on all ranks."""
        if self.world.control is None:
            return
        with self.world.naming_the_culprit("sending the first parameters"):
            tensors = [*self.module.parameters(), *self.module.buffers()]
            works = [dist.broadcast(t.data, 0, group=self.world.control, async_op=True) for t in tensors]
            for work in works:
                work.wait()

    def share_buffers(self) -> None:
        """Buffers (BatchNorm's running statistics) averaged over those who took part, so that all have the same."""
        workers, buffers = self.membership.active, [b for b in self.module.buffers() if b.numel()]
        if len(workers) < 2 or not buffers or not self.membership.takes_part:
            return
        group = self.membership.talk(workers)
        with self.world.naming_the_culprit("averaging buffers"):
            for buffer in buffers:
                value = buffer.detach().to("cpu", torch.float64)
                dist.all_reduce(value, group=group)
                buffer.copy_((value / len(workers)).to(buffer.dtype))

    def _share_with_parked(self) -> None:
        """At the end of a loop all ranks have the same model, the parked too."""
        self.share_buffers()
        if self.membership.parked:
            self.membership.hand_over(self.membership.active[0], self.membership.parked)
