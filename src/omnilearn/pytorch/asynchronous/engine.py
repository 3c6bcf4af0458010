"""The asynchronous engine, as a worker runs it: leases in, a gradient out, parameters in.

``optimizer.step()`` is one round trip: it sends the gradient of the batches since the last step and receives the
parameters of the server's newest version, the next lease and the next batch size. The optimizer itself runs on the
server.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from omnilearn.control import Plan
from omnilearn.data import Share
from omnilearn.data.leases import Lease
from omnilearn.engine.source import Piece
from omnilearn.errors import PeerFailure, UsageError
from omnilearn.observe import EventLog
from omnilearn.pytorch.asynchronous import wire
from omnilearn.pytorch.asynchronous.owner import is_scheduler
from omnilearn.pytorch.asynchronous.steps import StepLog
from omnilearn.pytorch.asynchronous.tensors import Tensors
from omnilearn.pytorch.asynchronous.wire import Header, Pair
from omnilearn.pytorch.engine import NO_STEP, NonFiniteError
from omnilearn.pytorch.held import Held
from omnilearn.pytorch.model import gate
from omnilearn.pytorch.world import World

log = logging.getLogger("omnilearn")


class AsyncEngine:
    """Drives the loop from inside ``loader``, ``backward`` and ``optimizer.step``."""

    def __init__(
        self,
        world: World,
        address: str,
        pair: Pair,
        first: Header,
        module: nn.Module,
        tensors: Tensors,
        optimizer: torch.optim.Optimizer,
        others: tuple[Any, ...],
        *,
        global_batch: int,
        nonfinite: str,
        on_plan: Callable[[Plan, int], None],
        events: EventLog,
    ) -> None:
        self.world, self.rank, self.address = world, world.rank, address
        self.module, self.optimizer, self.others = module, optimizer, others
        self.global_batch, self.nonfinite, self.events = global_batch, nonfinite, events
        self._pair: Pair | None = pair
        self._on_plan = on_plan
        self._tensors, self.gradient = tensors, tensors.gradient(pair)
        self.plan, self.workers, self.main = Plan((0,)), 1, 0
        self.version = self.generation = self.global_step = 0
        self.epoch, self.loader, self.piece = 0, None, None  # type: tuple[int, Any, Piece | None]
        self.begun = False  # an epoch was begun
        self.queue: deque[Lease] = deque()  # leases that no DataLoader has asked for yet
        self.skipped = self.late = self.discarded = 0
        self._outstanding = 0  # leases not yet pushed, the queue included
        self._backwards, self._weight, self._own_weights = 0, 0.0, False
        self._unpushed: list[Share] = []  # shares in the gradient, not yet sent
        self._held = Held(tensors.trainable)  # gradients of the share's micro-batches so far
        self._earlier = Held(tensors.trainable)  # of shares before it, not yet sent
        self._trainable = [p.requires_grad for p in module.parameters()]
        self._shares = 0  # computed so far
        self._left = False  # a loop was broken out of, and the server does not know yet
        self._rates: list[float] = []
        self._scheduled = torch.zeros(wire.MOST_OTHERS, 3, dtype=torch.float64).numpy()
        self._scheduled[:, 2] = math.nan
        self._clock: float | None = None  # the end of the last answer; None: what follows is not measured
        self._timing = (0, 0.0)
        self._steps = StepLog(events)
        self._step = 0
        note = self._take(first, "joining")
        self.next_epoch: int = note["next"]
        self._gate()

    def _gate(self) -> None:
        """Have the user's own objects do here what belongs here, and nothing else: the server has the rest."""
        self.optimizer._step_supports_amp_scaling = False
        gate(self.optimizer, "step", self._step_optimizer)
        for i, other in enumerate(self.others):
            if is_scheduler(other):
                gate_scheduler(other, lambda *args, i=i: self._count_schedule(i, *args))
                continue
            for method in ("step", "unscale_", "update"):  # a GradScaler is each worker's own
                if hasattr(other, method):
                    gate(other, method, lambda: not self.accumulating)

    # Talking to the server

    def _ask(self, kind: int, what: str, sent: Sequence[torch.Tensor] = (), note: Any = None, **fields: float) -> Any:
        """One round trip; the note that came back."""
        header = Header(kind, version=self.version, generation=self.generation, **fields)
        rates = [float(group["lr"]) for group in self.optimizer.param_groups][: wire.MOST_GROUPS]
        if rates != self._rates:
            header.learning_rates = rates  # set by the user's code
        header.scheduled[:] = self._scheduled
        self._scheduled[:, 0] = 0.0
        sent = list(sent)
        if note is not None:
            sent.append(wire.encode(note))
            header["note"], header["parts"] = len(sent[-1]), header["parts"] | wire.NOTE
        pair = self._pair
        if pair is None:
            raise UsageError("the connection to the server is closed: make a new OmniLearn object")
        try:
            pair.send(header, sent)
            answer = pair.receive_header((wire.OK, wire.LATE, wire.NOT_FINITE, wire.DISCARDED, wire.FAILED))
            return answer, self._take(answer, what)
        except (wire.Disconnected, wire.Nonsense) as error:
            self._pair = None
            raise PeerFailure(
                f"the server at {self.address} is gone ({what}: {error}): start again, from the last checkpoint"
            ) from None

    def _take(self, answer: Header, what: str) -> Any:
        """Receive an answer's parts and note what it says."""
        assert self._pair is not None
        self._tensors.receive(self._pair, answer["parts"])
        note = self._pair.receive_note(answer) or {}
        if answer["kind"] == wire.FAILED:
            raise UsageError(f"{what}: {note.get('error', 'refused by the server')}")
        if answer["parts"] & wire.VALUES:
            self.version = answer["version"]
        if answer["generation"] != self.generation:
            self.generation, self._outstanding = answer["generation"], 0
            self.queue.clear()
        self.workers, self.main, self.global_step = answer["workers"], answer["main"], answer["step"]
        leases = [Lease(answer["epoch"], *bounds) for bounds in answer.ranges]
        self.queue.extend(leases)
        self._outstanding += len(leases)
        self._set_rates(answer.learning_rates)
        if "plan" in note:
            batches, reason, predicted, instead_of = note["plan"]
            self.plan = Plan(tuple(batches), reason, predicted, instead_of)
            self._on_plan(self.plan, self._step)
        return note

    def _set_rates(self, rates: list[float]) -> None:
        self._rates = rates
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            if float(group["lr"]) != rate:
                group["lr"] = torch.full_like(group["lr"], rate) if torch.is_tensor(group["lr"]) else rate
        for other in self.others:
            if is_scheduler(other) and hasattr(other, "_last_lr"):
                other._last_lr = list(rates)

    # What the loader calls

    def begin_epoch(self, loader: Any) -> None:
        if self.loader is not None:
            raise UsageError("one training loop at a time: finish or break the loop under way first")
        self.settle()
        self.queue.clear()
        self._outstanding = 0
        answer, _ = self._ask(wire.BEGIN, "beginning an epoch", note=loader.describe())
        self.loader, self.epoch, self.begun = loader, answer["epoch"], True
        self._scheduled[:, 1:] = 0.0, math.nan
        self._clock = None

    def fill(self) -> None:
        """Have as many leases as the loader prefetches, as far as there are any."""
        assert self.loader is not None
        while self._outstanding < self.loader.depth:
            before = self._outstanding
            self._ask(wire.PULL, "asking for a lease")
            if self._outstanding == before:
                break

    def end_epoch(self) -> bool:
        """Whether the epoch is over, for all; otherwise there are leases that another worker gave back."""
        self._unpushed.clear()
        self._outstanding = 0  # the server counts what the loop made no step for as used
        answer, _ = self._ask(wire.END, "ending an epoch", self._tensors.buffers(), parts=wire.BUFFERS, leases=0)
        self._clock = None
        if not answer["over"]:
            return False
        self._end_loop()
        return True

    def hand_out(self, piece: Piece) -> None:
        self.piece, self._backwards, self._said = piece, 0, 0
        if piece.first:
            self._weight, self._own_weights = 0.0, False
            if [p.requires_grad for p in self.module.parameters()] != self._trainable:
                raise UsageError(
                    "requires_grad of a parameter has changed since prepare(): in asynchronous mode the server has the "
                    "trainable ones: freeze and unfreeze before prepare(), or close this OmniLearn and make a new one"
                )

    def take_back(self, piece: Piece) -> None:
        if not self._backwards:
            raise UsageError(
                f"omni.backward(loss) was not called for the last batch: every batch needs it exactly once, or its "
                f"samples are not learnt from (worker {self.rank}, epoch {self.epoch})"
            )
        self.piece = None
        if piece.last and self._unpushed:
            self.fill()

    def leave(self) -> None:
        """The loop was left early, by a break or an error: the two look the same from here."""
        self._end_loop()
        self._left = True

    def settle(self) -> None:
        """After a break, at the next thing all do together: the others may have what this worker has not done."""
        if self._left:
            self._left = False
            self._unpushed.clear()
            self._ask(wire.LEAVE, "leaving an epoch", self._tensors.buffers(), parts=wire.BUFFERS)

    def _end_loop(self) -> None:
        self._steps.write(now=True)
        self.piece = self.loader = None
        self.next_epoch = self.epoch + 1

    # What the user calls

    @property
    def accumulating(self) -> bool:
        return self.piece is not None and not self.piece.last

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        piece = self.piece
        if piece is None:
            raise UsageError("backward() belongs inside the loop over omni.loader(…): there is no batch under way")
        if self._backwards:
            raise UsageError(
                "backward() was called twice for one batch: add the losses up and call it once; for gradient "
                "accumulation use OmniLearn(micro_batch=…)"
            )
        if loss.dim() and loss.numel() != 1:
            raise UsageError(f"backward() needs the mean loss of the batch, one number, got shape {tuple(loss.shape)}")
        if not loss.requires_grad:
            raise UsageError("the loss does not depend on any trainable parameter: was it computed under no_grad()?")
        self._backwards += 1
        self._loss = loss.detach()
        if piece.first:
            self._earlier.lay_aside()
            self._own_weights = weight is not None
        elif self._own_weights != (weight is not None):
            raise UsageError("backward() must get a weight for all micro-batches of a share or for none")
        part = piece.samples if weight is None else float(weight)
        self._weight += part
        whole = piece.first and piece.last
        weighed_after = self._own_weights and not whole
        self._held.put_back()
        with self.gradient.final() if piece.last and not weighed_after else contextlib.nullcontext():
            (loss if whole else loss * (part / piece.share.total)).backward()
        if all(p.grad is None for p in self._tensors.trainable):
            raise UsageError(
                "the loss does not depend on any trainable parameter of the model that prepare() got: was it computed "
                "with another model, a copy for example?"
            )
        if not piece.last:
            self._held.lay_aside()
        else:
            if weighed_after:
                scale = piece.share.total / self._weight
                torch._foreach_mul_([p.grad for p in self._tensors.trainable if p.grad is not None], scale)
            self._earlier.add_back()
            self._unpushed.append(piece.share)
            self._shares += 1
            if self._shares == NO_STEP and not self._step:
                log.warning("%d batches without optimizer.step(): the model does not learn from them until then",
                            NO_STEP)  # fmt: skip

    def _step_optimizer(self) -> bool:
        """``optimizer.step()``: a round trip to the server. What the optimizer itself would do is done there."""
        if self.accumulating:
            return False
        if self.piece is None:
            raise UsageError("optimizer.step() belongs inside the loop over omni.loader(…)")
        if not self._unpushed:
            raise UsageError("optimizer.step() before omni.backward(loss), which takes the place of loss.backward()")
        shares, self._unpushed = self._unpushed, []
        samples = sum(share.total for share in shares)
        begin, version = time.perf_counter(), self.version
        present, again = self.gradient.collect()
        parts = [*again, *self._tensors.beside(present)]
        timed, seconds = self._timing
        self._timing = (0, 0.0)
        answer, _ = self._ask(
            wire.PUSH, "sending a gradient", parts, parts=wire.VALUES | wire.FLAGS | wire.BUFFERS, leases=len(shares),
            samples=samples, batch=timed, seconds=seconds, again=bool(again),
        )  # fmt: skip
        end = time.perf_counter()
        if answer["kind"] != wire.LATE:
            self._outstanding -= len(shares)
        applied = answer["kind"] == wire.OK
        self._steps.updates += applied
        staleness = answer["version"] - version - applied
        busy = 0.0
        if self._clock is not None and len(shares) == 1:
            self._timing = samples, max(end - self._clock - answer["held"], 1e-9)
            busy = begin - self._clock
            self.gradient.took(self._timing[1] / samples)
        if self.events:
            wait = end - begin if busy else 0.0
            self._steps.add(samples, busy, wait, staleness, float(self._loss))
        self._clock = end
        self._step += 1
        self._steps.write(now=False)
        self._heed(answer["kind"])
        return False

    def _heed(self, outcome: int) -> None:
        if outcome == wire.LATE:
            self.late += 1
            log.warning("rank %d was silent for too long: its samples were given to others, its gradient was dropped",
                        self.rank)  # fmt: skip
        elif outcome == wire.DISCARDED:
            self.discarded += 1
        elif outcome == wire.NOT_FINITE:
            self.skipped += 1
            told = f"the gradient of worker {self.rank} is not finite, and was refused by the server"
            if self.nonfinite == "raise":
                raise NonFiniteError(
                    f"{told}: lower the learning rate, clip gradients, or leave such steps out with "
                    f"OmniLearn(nonfinite='skip'); the other workers go on"
                )
            log.warning("%s: the step is left out", told)

    def _count_schedule(self, i: int, *args: Any) -> None:
        """``scheduler.step()``: counted here, done by the server."""
        if self.accumulating:
            return
        if self.piece is not None:
            self._scheduled[i, 0] += self.piece.share.total / self.global_batch
        else:
            self._scheduled[i, 1] += 1
            if args:
                self._scheduled[i, 2] = float(args[0])
                self._ask(wire.PULL, "stepping a scheduler")

    def meet(self, value: Any) -> dict[str, Any]:
        """Everybody's values, by rank: between epochs, together with the others."""
        self.settle()
        _, note = self._ask(wire.MEET, "meeting the others", note=value)
        self._clock = None
        met: dict[str, Any] = note["met"]
        return met

    def say(self, value: Any) -> list[Any]:
        """What the workers last said at this place of the loop's body; nobody waits."""
        self._said += 1
        _, note = self._ask(wire.SAY, "averaging a value", note={"number": self._said, "value": value})
        said: list[Any] = note["said"]
        return said

    def save(self, note: dict[str, Any], together: bool) -> None:
        if together:
            self.settle()
        self._ask(wire.SAVE, "saving a checkpoint", note={**note, "together": together})
        self.restart_clock()

    def load(self, folder: str) -> dict[str, Any]:
        self.settle()
        _, note = self._ask(wire.LOAD, "loading a checkpoint", note={"folder": folder})
        self.next_epoch = note["next"]
        content: dict[str, Any] = note
        return content

    def restart_clock(self) -> None:
        """What comes before the next step does not count as this worker's own time."""
        self._clock = None

    def limit(self, timeout: timedelta) -> None:
        """Wait so long at most from now on."""
        if self._pair is not None:
            self._pair.limit(timeout)

    def close(self) -> None:
        """Leave: with a word to the server."""
        if self._pair is not None:
            self.settle()
            self._ask(wire.BYE, "leaving")
        self.abandon()

    def end_threads(self) -> None:
        """Before the process ends, also where it fails."""
        self.abandon()

    def abandon(self) -> None:
        """Leave without a word: the server takes back what this worker held."""
        self.gradient.stop("this worker leaves")
        if self._pair is not None:
            with contextlib.suppress(Exception):
                self._pair.close()
            self._pair = None
        with contextlib.suppress(Exception):  # of a card that failed, say
            self._tensors.close()


def gate_scheduler(scheduler: Any, instead: Callable[..., None]) -> None:
    """Have ``scheduler.step(…)`` call ``instead(…)``, on the object that the user holds."""
    kind = type(scheduler)
    namespace = {"step": lambda _, *args, **kwargs: instead(*args, *kwargs.values()), "__module__": kind.__module__}
    scheduler.__class__ = type(kind.__name__, (kind,), namespace)
