"""The synchronous engine: a step is done together, by whoever takes part, with exact gradients.

The gradient of a step is ``Σ w_k·g_k / Σ w_k`` over the workers k that take part, g_k being the gradient of worker k's
mean loss and w_k the samples (or the user's weight) really in its batch: what one machine would compute on the whole
global batch. DistributedDataParallel averages over n workers, so each loss is scaled by ``w_k·n / Σ w_k`` before its
backward pass; where the weights' sum is not known beforehand it is reduced alongside and divided out afterwards.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
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
from omnilearn.errors import OmniLearnError, OutOfStepError, UsageError
from omnilearn.observe import EventLog
from omnilearn.pytorch import reduction
from omnilearn.pytorch.clock import Clock, later
from omnilearn.pytorch.finite import Finite
from omnilearn.pytorch.held import Held
from omnilearn.pytorch.loader import TrainLoader
from omnilearn.pytorch.membership import Membership
from omnilearn.pytorch.memory import Memory, OutOfMemoryError
from omnilearn.pytorch.model import fingerprint, gate, smallest_batch
from omnilearn.pytorch.reducer import COMPRESSED, TURN
from omnilearn.pytorch.shortage import Shortage
from omnilearn.pytorch.statistics import Statistics
from omnilearn.pytorch.watch import Place
from omnilearn.pytorch.world import World

log = logging.getLogger("omnilearn")

SUM = 2
"""How autograd notes a loss function's reduction='sum'."""
FIRST_LOSSES = 256
"""Steps of the job whose losses workers compare, also where nobody writes events."""
NO_STEP = 64
"""Batches without a step of an optimizer after which the log says so, where there was none at all."""
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
        world.where = lambda: (self.share.step if self.share is not None else self.step, self.loops)
        world.agree("models", fingerprint(module))
        world.agree("models", {"the order of parameters": [name for name, _ in module.named_parameters()]})
        self._broadcast()
        self._compress = None if compress is None else COMPRESSED[compress]
        self.membership = Membership(world, module, self.pack_for_peers, self.unpack_from_peer, self._compress)
        self._find_unused = self.membership.find_unused = find_unused_parameters
        self._parameters = list(module.parameters())
        self._trainable = [p.requires_grad for p in self._parameters]
        self._held = Held(self._parameters)  # of the step's micro-batches so far
        self._earlier = Held(self._parameters)  # of steps that the optimizer has not used
        self.statistics = Statistics(module)
        self._setup = _setup(self._trainable)
        self._made = 0, 0  # ``stepped`` when the loop began
        self.nonfinite, self.skipped = nonfinite, 0
        self.piece: Piece | None = None  # the micro-batch in the user's hands
        self._broken_off: Piece | None = None  # the one at which a loop was left early
        world.explain = self._explain
        self._backwards = 0  # of the current micro-batch
        self.stepped = 0, 0  # the job's steps before the optimizer's last step, and behind it
        self._unused = 0  # steps since an optimizer was last asked to use their gradient
        self.weight = 0.0  # of this step's micro-batches so far, where the user gives weights
        self._own_weights = False
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # as they were before lent samples
        mixed = any(r.device != "cpu" for r in world.resources)
        self._check = Finite(module, every_time=nonfinite == "skip", late=mixed)
        optimizer._step_supports_amp_scaling = False  # a GradScaler decides before a step
        gate(optimizer, "step", self._may_step, self._stepped)
        gate(optimizer, "zero_grad", lambda: True, self._stepped)
        for other in others:
            for method in ("step", "unscale_", "update"):  # of schedulers and GradScalers
                if hasattr(other, method):
                    gate(other, method, lambda: not self.accumulating, self._stepped if method == "update" else None)

    # Who takes part

    def form(self, workers: Workers) -> None:
        self.membership.enter(workers)
        self._wrapped_anew()

    def wrap(self) -> None:
        """Begin anew to reduce, with the same workers."""
        self.membership.wrap()
        self._wrapped_anew()

    def _wrapped_anew(self) -> None:
        if self.membership.reducer is not None:
            self.clock.restart(untimed=REBUILT)

    def _follow_trainable(self) -> None:
        """The script has frozen or unfrozen parameters: which have gradients is found anew, by all workers alike."""
        trainable = [p.requires_grad for p in self._parameters]
        if trainable != self._trainable:
            self._trainable, self._setup = trainable, _setup(trainable)
            self.membership.find_unused = self._find_unused
            self.wrap()

    def hand_over(self, source: int, targets: Sequence[int]) -> None:
        self.membership.hand_over(source, targets)

    def restart_clock(self) -> None:
        self.clock.restart()

    # What the loader calls

    def begin_epoch(self, source: Source) -> None:
        super().begin_epoch(source)
        assert isinstance(source, TrainLoader)
        source.cut = self.memory.cut
        self._made = self.stepped
        at = source.sampler
        first = tuple(k for k, batch in enumerate(self.planner.plan.batches) if batch)
        if not self.membership.knows(first):
            first = self.everybody
        # Not with the parked: what they are sent of the epoch before may still be on its way.
        self.membership.meet(
            self.world.place("a training loop", f"from sample {at.offset} of {at.size} in epoch {at.epoch}"), first
        )

    def hand_out(self, piece: Piece) -> None:
        self.piece, self._backwards = piece, 0
        if piece.first:
            self.begin_share(piece.share)
            self.weight, self._own_weights = 0.0, False
            if not piece.last:
                self.shortage.cut(piece)
            if piece.lent:
                self._buffers = [(b, b.detach().clone()) for b in self.module.buffers()]
        else:
            self._data += time.perf_counter() - self._asked
        if self.shortage.step_cuts is None:  # omni.step does it for each part
            self.memory.begin(piece.computed)

    def _forget_lent(self) -> None:
        """Samples that were only lent leave nothing behind."""
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)

    def take_back(self, source: Source, piece: Piece) -> None:
        self._forget_lent()
        self._buffers = []
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

    def end_threads(self) -> None:
        """Before the process ends, also where it fails: Python aborts it while a thread waits in C++."""
        self.planner.end_threads()
        self.membership.end_threads()

    def settle(self, what: str = "what all do together") -> None:
        self._broken_off = None
        super().settle(what)

    def agree_on_leaving(self, what: str, source: Source) -> None:
        at = source.sampler
        place = self.world.place(f"{what}, after a loop was left", f"at sample {at.offset} of epoch {at.epoch}")
        self.membership.meet(place, self.active)

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
        self.end_backward(piece)

    def begin_backward(self) -> Piece:
        """The micro-batch under way, whose gradient is now computed."""
        piece = self.piece
        if piece is None:
            raise UsageError("backward() belongs inside the loop over omni.loader(…): there is no batch under way")
        if self._backwards:
            raise UsageError(
                f"backward() was called twice for one batch (step {piece.share.step}): add the losses up and call it "
                f"once, or have omni.step(compute_loss, batch) do it; for gradient accumulation use "
                f"OmniLearn(micro_batch=…)"
            )
        self._backwards += 1
        if piece.first:
            self._follow_trainable()
            self._earlier.lay_aside(copy=True)
        else:
            self._held.put_back()
        return piece

    def end_backward(self, piece: Piece) -> None:
        """The micro-batch under way is computed: its gradient is kept, or reduced with those before it."""
        if piece.last:
            self.conclude()
        else:
            self._held.lay_aside()

    @property
    def overlapping(self) -> bool:
        """Whether the step's last backward pass reduces while it computes: an error in it reaches the others."""
        return self.membership.reducer is not None

    def differentiate(self, loss: torch.Tensor, weight: float | torch.Tensor | None, samples: int, last: bool) -> float:
        """One backward pass, of the step's last micro-batch or another. Returns the weight that it counts with."""
        assert self.piece is not None
        if loss.dim() and loss.numel() != 1:
            raise UsageError(f"backward() needs the mean loss of the batch, one number, got shape {tuple(loss.shape)}")
        if not loss.requires_grad:
            raise UsageError("the loss does not depend on any trainable parameter: was it computed under no_grad()?")
        if getattr(loss.grad_fn, "_saved_reduction", None) == SUM:
            raise UsageError(
                "backward() got a loss with reduction='sum', which grows with this worker's batch: use "
                "reduction='mean', or divide by what it is a sum over and say so: backward(loss / n, weight=n)"
            )
        self._loss = loss.detach()
        if not self.weight:
            self._own_weights = weight is not None
        elif self._own_weights != (weight is not None):
            raise UsageError("backward() must get a weight for all micro-batches of a step or for none")
        counts = samples if weight is None or not samples else float(weight)
        factor = counts / self.piece.share.total
        scaled = loss if factor == 1 else loss * factor
        reducer = self.membership.reducer if last else None
        if reducer is not None:
            scaled = reducer.arm(scaled, self._reducing(), self.weight + counts, self._own_weights)
        if last:
            self.clock.watch(scaled)
        scaled.backward()
        if reducer is None and not any(p.grad is not None for p in self._parameters):
            raise UsageError(
                "the loss does not depend on any trainable parameter of the model that prepare() got: was it computed "
                "with another model, a copy for example?"
            )
        self.weight += counts
        return counts

    def _reducing(self) -> Place:
        return self.world.place("reducing gradients", self._setup)

    def conclude(self) -> None:
        """After the step's last backward pass: what is not reduced yet, and the user's weights."""
        assert self.piece is not None
        share, count = self.piece.share, len(self.active)
        weight = torch.tensor(self.weight, dtype=torch.float64)
        if self.membership.reducer is not None:
            facts = self.membership.reducer.finish(self._reducing())
            weight = facts[0]
            self._together(facts, count)
        elif count > 1 or self.membership.find_unused is None:
            weight = self._reduce_first()
        if self._own_weights:
            reduction.divide(self.module, weight, share.total)
        self._earlier.add_back()
        self._forget_lent()
        # Before the clock's mark: it is there when the step's time is read.
        self.loss = later(self._loss) if self.events or share.step < FIRST_LOSSES else None
        self.clock.reduced()
        self.done, self._unused = True, self._unused + 1
        if self._unused == NO_STEP and self.stepped == self._made:
            log.warning("%d batches without optimizer.step(): the model does not learn from them until an optimizer "
                        "that prepare() got makes a step", NO_STEP)  # fmt: skip

    def _together(self, facts: torch.Tensor, count: int) -> None:
        """What travelled with the gradients says that all mean the same step. On a card it is read later."""
        assert self.piece is not None
        if facts.is_cuda:
            return
        _, given, turns = facts.tolist()
        step = self.piece.share.step
        if given not in (0, count):
            raise UsageError(f"in step {step} {given:g} of {count} workers gave backward() a weight: all or none")
        if turns != count * (step % TURN):
            raise OutOfStepError(
                f"the workers were not in the same step when they reduced gradients (rank {self.rank}: step {step}): "
                f"a loop was left on some of them only: stop together by omni.agree(condition)"
            )

    def _reduce_first(self, failure: str | None = None) -> torch.Tensor:
        """The first step's gradients, reduced by hand: it shows which parameters have none, on any worker.

        DistributedDataParallel must know beforehand whether to look for such parameters in every step. Here all hear of
        a ``failure``, too. Returns the sum of the weights.
        """
        members, place = self.membership, self.world.place("reducing the first gradients", self._setup)
        trainable = [p for p in self._parameters if p.requires_grad]
        used = [p.grad is not None for p in trainable]
        mine = pickle.dumps((used, failure, self.weight, self._own_weights))
        told = [pickle.loads(part) for part in members.meet(place, self.active, mine)]
        for message in [failure, *(theirs for _, theirs, *_ in told)]:
            if message is not None:
                raise OutOfMemoryError(message)
        if len({given for *_, given in told}) > 1:
            raise UsageError("backward() got a weight on some workers and none on others: all or none")
        anywhere = [any(flags) for flags in zip(*(flags for flags, *_ in told), strict=True)]
        if members.find_unused is None:
            members.find_unused = not all(all(flags) for flags, *_ in told)
        if members.group is not None:
            needed = [p for p, somewhere in zip(trainable, anywhere, strict=True) if somewhere]
            reduction.by_hand(self.world, needed, members.group, self.active, self._compress, place)
            members.wrap()
        return torch.tensor(sum(weight for _, _, weight, _ in told), dtype=torch.float64)

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
        self._unused = 0
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
        """The optimizer has used the gradient, or something else is done that follows it."""
        if not self.accumulating:
            self._unused = 0
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
        place = self.world.place("a gradient that is not finite", f"of step {step}")
        losses = [pickle.loads(part) for part in self.membership.meet(place, self.active, pickle.dumps(float(loss)))]
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

    def pack_for_peers(self) -> dict[str, Any]:
        """What a worker of this job has to have, beside what a checkpoint holds: it may have missed that the script
        froze something, or gradients that no optimizer has used yet."""
        gradients = [p.grad for p in self._parameters] if self._unused else None
        return {**self.pack(), "trainable": [p.requires_grad for p in self._parameters], "gradients": gradients}

    def unpack_from_peer(self, state: dict[str, Any]) -> None:
        for p, trainable in zip(self._parameters, state["trainable"], strict=True):
            p.requires_grad_(trainable)
        self._trainable, self._setup = list(state["trainable"]), _setup(state["trainable"])
        self.unpack(state)
        gradients = state["gradients"] or [None] * len(self._parameters)
        for p, gradient in zip(self._parameters, gradients, strict=True):
            p.grad = None if gradient is None else gradient.to(p.device)

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
        if self.takes_part:
            self.statistics.average(self.world, self.membership, self.active)


def _setup(trainable: list[bool]) -> str:
    """Which parameters train, in a word: workers can only reduce together where it is the same."""
    mark = hashlib.blake2b(bytes(trainable), digest_size=3).hexdigest()
    return f"{sum(trainable)} of {len(trainable)} parameters train, {mark}"
