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
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from omnilearn.control import Plan, Policy, Problem
from omnilearn.engine.loop import SyncLoop, Workers
from omnilearn.engine.planner import Planner
from omnilearn.engine.source import Piece, Source
from omnilearn.errors import OmniLearnError, UsageError
from omnilearn.observe import EventLog
from omnilearn.pytorch import reduction
from omnilearn.pytorch.clock import Clock, later
from omnilearn.pytorch.finite import Finite
from omnilearn.pytorch.loader import TrainLoader
from omnilearn.pytorch.membership import Membership
from omnilearn.pytorch.memory import Memory, OutOfMemoryError
from omnilearn.pytorch.model import OmniModel, fingerprint, gate, smallest_batch
from omnilearn.pytorch.shortage import Shortage
from omnilearn.pytorch.world import World

log = logging.getLogger("omnilearn")

REBUILT = 2
"""Steps of a new group that say little: in the second one, DistributedDataParallel orders its buckets anew."""


class NonFiniteError(OmniLearnError, ArithmeticError):
    """The gradient of a step is not finite. Raised on all ranks alike."""


class SyncEngine(SyncLoop):
    """Drives the loop from inside ``loader``, ``backward`` and ``optimizer.step``."""

    world: World

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
        self.module, self.optimizer, self.others = module, optimizer, others
        self.clock = Clock(world.device, meanwhile=lambda: self.planner.think())
        events = events or EventLog(None, world.rank)
        self.memory = Memory(
            world.device,
            most=None if problem.micro is None else int(problem.micro[world.rank]),
            minimum=smallest_batch(module),
            fixed=world.size > 1 and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()),
        )
        domain = self.memory.domain
        self.memory.sharers = world.gather(domain).count(domain)
        self.shortage = Shortage(world.rank, self.memory, events)
        planner = Planner(world, self.clock, policy, problem, on_plan, events, self.memory, self._rate)
        super().__init__(world, planner, events)
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
        self._backwards = 0  # of the current micro-batch
        self.stepped = 0, 0  # the job's steps before the optimizer's last step, and behind it
        self.weight = 0.0  # of this step's micro-batches so far, where the user gives weights
        self._own_weights = False
        self._reduced: tuple[torch.Tensor, Any] | None = None  # the sum of all weights, under way
        self._check = Finite(module, every_time=nonfinite == "skip")
        optimizer._step_supports_amp_scaling = False  # a GradScaler decides before a step
        gate(optimizer, "step", self._may_step, self._stepped)
        gate(optimizer, "zero_grad", lambda: not self.accumulating, self._stepped)
        for other in others:
            for method in ("step", "unscale_", "update"):  # of schedulers and GradScalers
                if hasattr(other, method):
                    gate(other, method, lambda: not self.accumulating, self._stepped if method == "update" else None)

    # Who takes part

    def form(self, workers: Workers) -> None:
        self.membership.enter(workers)
        self._wrapped_anew()

    def wrap(self) -> None:
        """Wrap the model anew, for the same workers."""
        self.membership.wrap()
        self._wrapped_anew()

    def _wrapped_anew(self) -> None:
        if self.membership.wrapped is not None:
            self.clock.restart(untimed=REBUILT)

    def hand_over(self, source: int, targets: Sequence[int]) -> None:
        self.membership.hand_over(source, targets)

    def restart_clock(self) -> None:
        self.clock.restart()

    # What the loader calls

    def begin_epoch(self, source: Source) -> None:
        super().begin_epoch(source)
        assert isinstance(source, TrainLoader)
        source.cut = self.memory.cut

    def hand_out(self, piece: Piece) -> None:
        self.piece, self._backwards = piece, 0
        if piece.first:
            self.begin_share(piece.share)
            self.weight, self._own_weights = 0.0, False
            if not piece.last:
                self.shortage.cut(piece)
        else:
            self._data += time.perf_counter() - self._asked
        self.reduce_with_next(piece.last)
        if self.shortage.step_cuts is None:  # omni.step does it for each part
            self.memory.begin(piece.samples)
        self.model.used()

    def take_back(self, source: Source, piece: Piece) -> None:
        if not self._backwards:
            raise UsageError(
                f"omni.backward(loss) was not called for the last batch (step {piece.share.step}): every batch needs "
                f"it exactly once, or the other workers wait for this one's gradient (omni.step survives running "
                f"out of memory)"
            )
        if piece.last:
            self.end_share(source, piece.share)
        self.piece, self._asked = None, time.perf_counter()

    def leave(self, source: Source) -> None:
        self.memory.abandon()
        self._broken_off = self.piece
        super().leave(source)

    def settle(self) -> None:
        self._broken_off = None
        super().settle()

    def check_late(self) -> None:
        if (bad := self._check.outstanding()) is not None:
            self._not_finite(*bad)

    def _end_loop(self) -> None:
        super()._end_loop()
        self.piece = None

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
        wrapped = self.membership.wrapped
        if wrapped is not None and wrapped.require_backward_grad_sync != reduce:  # slow to set
            wrapped.require_backward_grad_sync = reduce

    def differentiate(self, loss: torch.Tensor, weight: float | torch.Tensor | None, samples: int, last: bool) -> float:
        """One backward pass, of the step's last micro-batch or another. Returns the weight that it counts with."""
        assert self.piece is not None
        if loss.dim() and loss.numel() != 1:
            raise UsageError(f"backward() needs the mean loss of the batch, one number, got shape {tuple(loss.shape)}")
        if not loss.requires_grad:
            raise UsageError("the loss does not depend on any trainable parameter: was it computed under no_grad()?")
        if not self.model.used():
            raise UsageError(
                "the loss was not computed with the model that prepare() returned: call that one in the loop, "
                "model(x); its other methods do not count as a call"
            )
        self._loss = loss.detach()
        if not self.weight:
            self._own_weights = weight is not None
        elif self._own_weights != (weight is not None):
            raise UsageError("backward() must get a weight for all micro-batches of a step or for none")
        counts = samples if weight is None else float(weight)
        factor = counts * len(self.active) / self.piece.share.total
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
        self.loss = later(self._loss) if self.events else None
        self.clock.reduced()
        self.done = True

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
        everywhere = self.world.gather((used, failure), members.talk(self.active)) if members.group else []
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
            raise UsageError(
                f"optimizer.step() before omni.backward(loss) in step {self.piece.share.step}: it takes the place of "
                f"loss.backward()"
            )
        if not self._finite():
            self._stepped()  # as if it had been done
            return False
        return True

    def _stepped(self) -> None:
        if self.piece is not None and self.source is not None and self.done:
            self.source.sampler.consumed(self.piece.share)  # a checkpoint saved now goes on behind this step
            now = self.source.sampler.step
            if now != self.stepped[1]:
                self.stepped = self.stepped[1], now

    def _rate(self) -> float:
        """The learning rates, added up: those that can be read without waiting for a card."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return sum(float(rate) for rate in rates if not (torch.is_tensor(rate) and rate.is_cuda))

    def _finite(self) -> bool:
        """Whether the step may be done, as far as its gradient is concerned: the same on all ranks."""
        if self.piece is None:
            return True
        bad = self._check.check(self.piece.share.step, self._loss)
        return bad is None or self._not_finite(*bad)

    def _not_finite(self, step: int, loss: torch.Tensor) -> bool:
        """Raise, or say that the step is left out: False."""
        group = self.membership.talk(self.active)
        losses = self.world.gather(float(loss), group) if group is not None else [float(loss)]
        told = ", ".join(f"rank {rank}: {loss:g}" for rank, loss in zip(self.active, losses, strict=True))
        if self.rank == self.active[0]:
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

    def pack(self) -> dict[str, Any]:
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "others": [other.state_dict() for other in self.others],
            "unused": self.membership.find_unused,
            "stepped": self.stepped,
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
        self.stepped = state.get("stepped", self.stepped)

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
        workers, buffers = self.active, [b for b in self.module.buffers() if b.numel()]
        if len(workers) < 2 or not buffers or not self.takes_part:
            return
        group = self.membership.talk(workers)
        with self.world.naming_the_culprit("averaging buffers"):
            # All in one message: a deep network has hundreds of them, and each would cost a round trip.
            values = torch.cat([buffer.detach().flatten().double() for buffer in buffers]).cpu()
            dist.all_reduce(values, group=group)
            means = (values / len(workers)).to(buffers[0].device).split([buffer.numel() for buffer in buffers])
            for buffer, mean in zip(buffers, means, strict=True):
                buffer.copy_(mean.view_as(buffer))
