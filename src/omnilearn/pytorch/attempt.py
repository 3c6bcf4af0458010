"""``omni.step``: a batch computed so that running out of memory is survived.

A size that never ran is tried without reducing anything meanwhile, so that an error stays here: what it left behind is
undone, memory released, and the same samples are computed again in smaller parts. The gradient is the same; the others
wait where they always do, in the reduction. To have one that overlaps all the same, a small part is left for the end,
also from then on: an error there could not be undone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from omnilearn.errors import OmniLearnError
from omnilearn.pytorch import checkpoint, micro
from omnilearn.pytorch.memory import is_out_of_memory

if TYPE_CHECKING:
    from omnilearn.engine.source import Piece
    from omnilearn.pytorch.engine import SyncEngine

REST = 8
"""The part left for the end, where a new size is tried, is an eighth."""

Weight = float | Callable[[Any], float] | None


def compute(engine: SyncEngine, compute_loss: Callable[[Any], torch.Tensor], batch: Any, weight: Weight) -> Any:
    """Forward and backward passes for the micro-batch under way, and the reduction after the step's last."""
    piece, memory = engine.begin_backward(), engine.memory
    samples = piece.computed
    tail = max(samples // REST, memory.minimum)
    cut = micro.cutter(batch, samples) if weight is None or callable(weight) else None
    engine.shortage.step_cuts = cut is not None and not memory.fixed
    done, odd = 0, False
    losses: list[tuple[torch.Tensor, float]] = []
    while done < samples:
        left = samples - done
        size = memory.cut(left)[0] if cut is not None else left
        new, care = memory.is_new(size), memory.is_new(size) or memory.tight
        whole = size == left
        if care and cut is not None and piece.last and engine.overlapping and left - tail >= memory.minimum:
            size, odd = memory.cut(left - tail)[0], odd or (new and whole)
        part = cut(done, done + size) if cut is not None and size < samples else batch
        last = piece.last and size == left
        outcome = _one(engine, compute_loss, part, weight, size, last, care, fresh=piece.first and not done)
        if outcome is None:
            odd = True
            _make_room(engine, piece, size)
            continue
        if new and whole:
            memory.trust(left)
        losses.append(outcome)
        done += size
        if size < left:
            engine.shortage.cut(piece)
    if piece.last and odd:
        engine.clock.restart()  # this step's time says nothing about others
    engine.end_backward(piece)
    counted = sum(counts for _, counts in losses)
    return losses[0][0] if len(losses) == 1 or not counted else sum(loss * (n / counted) for loss, n in losses)


def _one(
    engine: SyncEngine,
    compute_loss: Callable[[Any], torch.Tensor],
    part: Any,
    weight: Weight,
    size: int,
    last: bool,
    care: bool,
    fresh: bool,
) -> tuple[torch.Tensor, float] | None:
    """The loss and its weight, or None where memory ran out and nothing of the pass is left."""
    memory, local = engine.memory, not (last and engine.overlapping)
    undo = _Undo(engine, care and local)
    backward = False
    memory.begin(size)
    try:
        loss = compute_loss(part)
        backward = True
        counted = 0 if engine.piece is not None and engine.piece.lent else size
        counts = engine.differentiate(loss, weight(part) if callable(weight) else weight, counted, last)
    except Exception as error:
        memory.abandon()
        if isinstance(error, OmniLearnError) or not is_out_of_memory(error) or not engine.shortage.step_cuts:
            raise
        if backward and not (local and (care or fresh)):
            raise  # the others have part of this gradient already, or it is added to what was there
    else:
        memory.end()
        undo.keep()
        return loss.detach(), counts
    # Only here, behind the handler: the error's traceback held what the pass had computed.
    undo.undo(backward)
    return None


def _make_room(engine: SyncEngine, piece: Piece, size: int) -> None:
    engine.memory.release()
    if size < 2 * engine.memory.minimum:
        engine.give_up(engine.shortage.hopeless(piece, size))
    engine.shortage.survived(piece, size, engine.memory.refuse(size))


class _Undo:
    """What a pass changes, to be put back: gradients, buffers, random numbers.

    With care, a pass adds nothing to gradients that are there already before it has ended well. Without, only running
    statistics are kept, so that ordinary passes cost next to nothing: undone is only one before which there were no
    gradients.
    """

    def __init__(self, engine: SyncEngine, care: bool) -> None:
        self._engine, self._care = engine, care
        self._weight = engine.weight
        if not care:
            moving = engine.statistics.moving().values() if engine.shortage.step_cuts else ()
            self._buffers = [(b, b.detach().clone()) for b in moving]
            return
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]
        self._gradients = [p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        self._buffers = [(b, b.detach().clone()) for b in engine.module.buffers()]
        self._random = checkpoint.random_state(engine.world.device)

    def keep(self) -> None:
        if not self._care:
            return
        for p, before in zip(self._parameters, self._gradients, strict=True):
            if before is not None:
                p.grad = before if p.grad is None else before.add_(p.grad)

    def undo(self, backward: bool) -> None:
        self._engine.weight = self._weight
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        if not self._care:
            if backward:
                for p in self._engine.module.parameters():
                    p.grad = None
            return
        for p, before in zip(self._parameters, self._gradients, strict=True):
            p.grad = before
        checkpoint.restore_random_state(self._random, self._engine.world.device)
