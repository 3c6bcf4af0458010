"""How gradients become one: DistributedDataParallel's buckets, sent while the backward pass still computes.

Nothing is wrapped around the user's model. DistributedDataParallel sees a module that has its parameters and whose
forward pass gives back the loss: that is called where gradients are to be reduced, and reads from the loss which
parameters it depends on. Buckets are added up, as each worker's loss is scaled by its part of the whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from omnilearn.errors import UsageError
from omnilearn.pytorch.watch import Place
from omnilearn.pytorch.world import World

COMPRESSED = {"bf16": torch.bfloat16}
"""What gradients may be sent as, by the names that users give."""


AGREEING = 2
"""Passes in which DistributedDataParallel agrees on the order of its buckets."""
FACTS = 3
"""Numbers that travel with the gradients and are added up: the weight, whether the user gave it, the step."""
TURN = 4096
"""The step is told modulo this, so that its sum is exact in float32."""


class _Parameters(nn.Module):
    """The trainable parameters of ``model``, and the facts; called with a loss, it returns that."""

    def __init__(self, model: nn.Module, kind: torch.dtype) -> None:
        super().__init__()
        self.facts = nn.Parameter(torch.zeros(FACTS, dtype=kind, device=next(model.parameters()).device))
        sparse = (nn.Embedding, nn.EmbeddingBag)
        # DistributedDataParallel looks at these layers for whether gradients are sparse.
        layers = [layer for layer in model.modules() if isinstance(layer, sparse) and layer.sparse]
        known = {id(p) for layer in layers for p in layer.parameters()}
        for k, layer in enumerate(layers):
            self.add_module(f"sparse{k}", layer)
        for k, p in enumerate(model.parameters()):
            if p.requires_grad and id(p) not in known:
                self.register_parameter(f"p{k}", p)

    def forward(self, loss: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        told: torch.Tensor = _Telling.apply(loss, self.facts, facts)
        return told


class _Telling(torch.autograd.Function):
    """The loss as it is; the gradient of the parameter ``_`` is ``facts``."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, _: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        ctx.facts = facts
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, ctx.facts, None


class Reducer:
    """Of one set of workers. ``talk`` is their group for values on the CPU; ``kind`` what is sent, where it is not what
    gradients are."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        group: Any,
        talk: Any,
        workers: Sequence[int],
        find_unused: bool,
        kind: torch.dtype | None,
    ) -> None:
        self._world, self._model, self._group, self._workers, self._kind = world, model, group, tuple(workers), kind
        self._group_to_talk, self._find_unused, self._passes = talk, find_unused, 0
        self._waits = dist.get_backend(group) == "gloo"  # NCCL's works are waited for by the card, not by the host
        self._pending: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        self._complete = False
        self._error: Exception | None = None
        self._parameters = _Parameters(model, _kind_of_facts(model, kind))
        self._ddp = DistributedDataParallel(
            self._parameters,
            process_group=group,
            init_sync=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused,
        )
        # A lambda: torch refuses hooks whose annotations are strings. Weak: a cycle through C++ is never collected.
        me = weakref.proxy(self)
        self._ddp.register_comm_hook(None, lambda _, bucket: me._send(bucket))

    def arm(self, loss: torch.Tensor, place: Place, weight: float, given: bool) -> torch.Tensor:
        """The loss whose backward pass sends gradients. Workers agree on their buckets here, once."""
        self._pending.clear()
        self._complete, self._error = False, None
        facts = torch.tensor([weight, given, place.step % TURN], dtype=self._parameters.facts.dtype)
        self._parameters.facts.grad = None
        if self._passes < AGREEING:  # what it says to the others then is waited for where nobody can interrupt it
            self._passes += 1
            self._world.meet(place, self._group_to_talk, self._workers)
        if self._find_unused and self._world.watch is not None:  # so is what it says then at the end of every pass
            self._world.watch.begin(place, self._workers)
        with self._world.naming_the_culprit(str(place)):
            armed: torch.Tensor = self._ddp(loss, facts.to(loss.device, non_blocking=True))
        return armed

    def _send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Called in the backward pass, with a bucket that is full. What goes wrong is raised behind it."""
        buffer = bucket.buffer()
        sent = buffer if self._holds_facts(bucket) else packed(buffer, self._kind)
        try:
            if self._error is None:
                self._pending.append((buffer, sent, dist.all_reduce(sent, group=self._group, async_op=True)))
        except Exception as error:
            self._error = error
        self._complete = bucket.is_last()
        # Not the future of the reduction: gloo's knows nothing of a card's streams. Gradients are views of the buckets.
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        done.set_result(buffer)
        return done

    def _holds_facts(self, bucket: dist.GradBucket) -> bool:
        return self._kind is not None and any(p is self._parameters.facts for p in bucket.parameters())

    def finish(self, place: Place) -> torch.Tensor:
        """After the backward pass: the sums are the gradients. Returns the sums of the facts."""
        if self._error is None and not self._complete:
            raise UsageError(self._incomplete(place.step))
        with self._world.naming_the_culprit(str(place)):
            if self._error is not None:
                raise self._error
            for buffer, sent, work in self._pending:
                if self._waits:
                    self._world.wait(work, place, self._workers)
                else:
                    work.wait()
                if sent is not buffer:
                    buffer.copy_(sent)
        self._pending.clear()
        facts = self._parameters.facts.grad
        assert facts is not None
        return facts

    def _incomplete(self, step: int) -> str:
        missing = [name for name, p in self._model.named_parameters() if p.requires_grad and p.grad is None]
        which = f" ({', '.join(missing[:3])}{', …' if len(missing) > 3 else ''})" if missing else ""
        return (
            f"in step {step} the loss does not depend on all parameters{which} that it depended on in the first step: "
            f"if which ones are used changes from step to step, say so: prepare(…, find_unused_parameters=True)"
        )


def _kind_of_facts(model: nn.Module, compress: torch.dtype | None) -> torch.dtype:
    """One that is exact enough. In a bucket with the gradients, unless these lose bits on their way."""
    used = {p.dtype for p in model.parameters() if p.requires_grad}
    alone = [kind for kind in (torch.float64, torch.float32) if kind not in used]
    shared = [kind for kind in (torch.float32, torch.float64) if kind in used]
    return ([*alone, *shared] if compress is not None else [*shared, *alone])[0]


def packed(gradient: torch.Tensor, kind: torch.dtype | None) -> torch.Tensor:
    """A gradient as it is sent."""
    fewer = kind is not None and gradient.is_floating_point() and gradient.itemsize > kind.itemsize
    return gradient.to(kind) if fewer and not gradient.is_sparse else gradient
