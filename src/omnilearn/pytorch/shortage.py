"""What is said when memory is short: events, log lines, and what a user can do about it."""

from __future__ import annotations

import logging

from omnilearn.engine.source import Piece
from omnilearn.observe import EventLog
from omnilearn.pytorch.memory import Memory, OutOfMemoryError, is_out_of_memory

log = logging.getLogger("omnilearn")


class Shortage:
    """Speaks for one rank. ``step_cuts``: whether omni.step can cut its batch (None: it is not in use)."""

    def __init__(self, rank: int, memory: Memory, events: EventLog) -> None:
        self.rank, self.memory, self.events = rank, memory, events
        self.step_cuts: bool | None = None
        self._told: int | None = None  # the micro-batch that was last spoken of

    def survived(self, piece: Piece, samples: int, smaller: int) -> None:
        """A micro-batch did not fit, and is computed again in smaller ones. The others hear of it with the timings."""
        self._told, step = smaller, piece.share.step
        self.events.write("oom", step=step, samples=samples, micro_batch=smaller)
        log.warning("step %d: rank %d ran out of memory with %d samples: it computes %d at a time from now on",
                    step, self.rank, samples, smaller)  # fmt: skip

    def hopeless(self, piece: Piece, samples: int) -> OutOfMemoryError:
        """The error to end with: not even the smallest micro-batch fits."""
        self.events.write("oom", step=piece.share.step, samples=samples, micro_batch=None)
        return OutOfMemoryError(
            f"rank {self.rank} runs out of memory with {'one sample' if samples == 1 else f'{samples} samples'}, and "
            f"fewer cannot be computed at a time ({self.memory}): use a smaller model or smaller samples, activation "
            f"checkpointing, or leave this worker out"
        )

    def cut(self, piece: Piece) -> None:
        """Once: the share is computed in several passes, because of what was learned about memory."""
        size, share = self.memory.micro_batch or 0, piece.share.sizes[self.rank]
        if 0 < size < share and size not in (self._told, self.memory.most):
            self._told, step = size, piece.share.step
            self.events.write("memory", step=step, batch=share, micro_batch=size, why=str(self.memory))
            log.info("step %d: rank %d computes at most %d of its %d samples at a time (%s)",
                     step, self.rank, size, share, self.memory)  # fmt: skip

    def advice(self, piece: Piece | None, error: BaseException) -> str:
        """What a user can do about an error that ends the training ("": nothing is known)."""
        if piece is None or isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            return ""
        half = max(piece.samples // 2, self.memory.minimum)
        ways = [f"bound what is computed at a time with OmniLearn(micro_batch={half})"]
        if self.memory.fixed:
            ways = [f"bound the shares with OmniLearn(max_batch={half}): SyncBatchNorm does not allow micro-batches"]
        elif self.step_cuts is None:
            ways.insert(0, "use omni.step(compute_loss, batch), which computes the same samples again in smaller parts")
        elif not self.step_cuts:
            ways.append("give omni.step a batch of tensors and lists that have one entry per sample, and a weight as a "
                        "function of the batch: such a batch it can cut")  # fmt: skip
        return (
            f"rank {self.rank} ran out of memory in step {piece.share.step}, with {piece.samples} samples at a time: "
            f"{', or '.join(ways)}"
        )
