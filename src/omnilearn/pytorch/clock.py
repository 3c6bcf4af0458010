"""How long does this worker compute, and how long does it wait? Measured without stopping anything.

A step's *busy* time runs from the end of one reduction to the moment the last local gradient of the next step is ready:
optimizer, data, forward, backward. *Wait* runs from there to the end of the reduction. On CUDA both are read from
events some steps later, so that no stream is synchronised.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from omnilearn.engine.planner import Timing


class Clock:
    """One per process. ``reduced`` is called after the backward pass; ``meanwhile`` by it, when it begins to wait."""

    def __init__(self, device: torch.device, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._meanwhile = meanwhile
        self._cuda = device.type == "cuda"
        self._last: Any = None  # the end of the reduction before
        self._untimed = 1  # so many steps from now on say nothing
        self._ready: Any = None
        self._steps: deque[tuple[Any, Any, Any]] = deque()

    def restart(self, untimed: int = 1) -> None:
        """What came before (an evaluation, a parking) does not count as this worker's busy time: the next step, or the
        next ``untimed`` ones, say nothing."""
        self._untimed = max(self._untimed, untimed)

    def watch(self, loss: torch.Tensor) -> None:
        """Note the moment when the backward pass of ``loss`` has computed every local gradient.

        The callback is queued at the very start of the backward pass; DistributedDataParallel queues the one that
        waits for its reductions later, and callbacks run in order.
        """
        self._ready = None

        def queue(_: torch.Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(self._mark)

        loss.register_hook(queue)

    def _mark(self) -> None:
        self._ready = self._now()
        self._meanwhile()

    def reduced(self) -> None:
        end = self._now()
        self._steps.append((None if self._untimed else self._last, self._ready or end, end))
        self._last, self._untimed = end, max(self._untimed - 1, 0)

    def clear(self) -> None:
        self._steps.clear()

    def take(self) -> Timing | None:
        """The timing of the oldest step not taken yet (None: not known). On CUDA not for the current step."""
        if not self._steps:
            return None
        start, ready, end = self._steps.popleft()
        if start is None:
            return None
        if not self._cuda:
            return Timing(max(ready - start, 1e-9), max(end - ready, 0.0))
        end.synchronize()  # long past: the host has launched another step since
        return Timing(max(start.elapsed_time(ready) / 1e3, 1e-9), max(ready.elapsed_time(end) / 1e3, 0.0))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def later(value: torch.Tensor) -> torch.Tensor:
    """A number that can be read some steps later without stopping the card; not a number until it is there."""
    value = value.detach()
    if not value.is_cuda:
        return value
    kept = torch.full((), float("nan"), dtype=value.dtype, pin_memory=True)
    return kept.copy_(value.reshape(()), non_blocking=True)
