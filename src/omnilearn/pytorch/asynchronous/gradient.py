"""A worker's gradient on its way to the server: it leaves in buckets, each as soon as the backward pass has filled it.

Between two steps every bucket leaves exactly once, early or by ``collect``; the server has receives posted for all of
them. What the user's code does to gradients before ``optimizer.step()`` (clips, scales, accumulates, drops them) is
found by comparing what left with what is there then. If anything differs, all of it follows once more, and from then on
nothing leaves early: such code does the same in every step. Nor does it where the first steps are not faster by it.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from omnilearn.errors import UsageError
from omnilearn.pytorch.asynchronous import wire
from omnilearn.pytorch.asynchronous.layout import Layout

log = logging.getLogger("omnilearn")

SWITCH = "OMNILEARN_EARLY"
"""Set to 0, gradients leave when ``optimizer.step()`` is called and never before; set to 1, as early as they can;
otherwise it is tried."""
TRIES = 8
"""Steps, of each way."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Trial:
    """Whether something makes steps faster: it has every other step for a while."""

    def __init__(self) -> None:
        self.turn = True
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def took(self, seconds: float) -> bool | None:
        """Note a step's time. The verdict, once there is one: whether it is faster with it."""
        self._seconds[self.turn].append(seconds)
        self.turn = not self.turn
        if len(self._seconds[False]) < TRIES:
            return None
        return median(self._seconds[True]) < median(self._seconds[False])


class Gradient:
    """The gradients of ``parameters`` in ``flat``, the main memory that they leave from. On a card they are gathered in
    a flat buffer there and copied from it, on a stream of their own.

    Without ``send`` nothing is sent: the server sees that memory, and is told at the step.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        layout: Layout,
        flat: torch.Tensor,
        device: torch.device,
        send: Callable[[int, torch.Tensor], None] | None,
    ) -> None:
        self._parameters, self._flat, self._send = parameters, flat, send
        self._staged = flat if device.type == "cpu" else layout.empty(device)
        self._windows = layout.views(self._staged)
        self._buckets = layout.buckets(wire.BUCKET)
        self._device: Any = torch.get_device_module(device)  # the CPU has streams and events too: they do nothing
        self._stream = self._device.Stream()
        self.early = 0  # buckets that were full before their step, in all
        self._final = False
        self._begin()
        self._hooks: list[RemovableHandle] = []
        switch = os.environ.get(SWITCH)
        self._trial = None if switch == "1" else Trial()
        # With one bucket there is nothing to gain: it is full when the backward pass ends.
        if switch != "0" and send is not None and len(self._buckets) > 1:
            for k, bucket in enumerate(self._buckets):
                for i in bucket.members:
                    self._hooks.append(parameters[i].register_post_accumulate_grad_hook(partial(self._arrived, k, i)))

    def _begin(self) -> None:
        self._missing = [set(bucket.members) for bucket in self._buckets]
        self._filled: set[int] = set()
        self._copying: deque[tuple[int, Any]] = deque()  # full buckets, and the events after which they can be sent

    @contextmanager
    def final(self) -> Iterator[None]:
        """Around a backward pass: what arrives in it is the gradient of the next step, as far as we know."""
        self._final = self._trial is None or self._trial.turn
        try:
            yield
        finally:
            self._final = False

    def _arrived(self, k: int, i: int, _: torch.Tensor) -> None:
        if not self._final or k in self._filled:
            return
        self._missing[k].discard(i)
        if not self._missing[k] and all(map(self._is_dense, self._buckets[k].members)):
            self._leave(k)
            self.early += 1
        self._send_copied(wait=False)

    def _is_dense(self, i: int) -> bool:
        gradient = self._parameters[i].grad
        return gradient is not None and gradient.layout is torch.strided

    def _leave(self, k: int) -> None:
        self._copying.append((k, self._fill(k)))
        self._filled.add(k)

    @torch.no_grad()
    def _fill(self, k: int) -> Any:
        """Copy a bucket's gradients; the event after which they are in main memory."""
        begin, end, members = self._buckets[k]
        there = [i for i in members if self._parameters[i].grad is not None]
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            if there:
                torch._foreach_copy_([self._windows[i] for i in there], [self._parameters[i].grad for i in there])
            for i in set(members).difference(there):
                self._windows[i].zero_()
            if self._staged is not self._flat:
                self._flat[begin:end].copy_(self._staged[begin:end], non_blocking=True)
        event = self._device.Event()
        event.record(self._stream)
        return event

    def _send_copied(self, wait: bool) -> None:
        while self._copying and (wait or self._copying[0][1].query()):
            k, event = self._copying.popleft()
            event.synchronize()
            if self._send is not None:
                self._send(k, self._flat[self._buckets[k].begin : self._buckets[k].end])

    def collect(self) -> tuple[list[bool], list[torch.Tensor]]:
        """Have all of it leave. Which gradients there are, and what must be sent again."""
        if any(p.grad is not None and p.grad.is_sparse for p in self._parameters):
            raise UsageError("sparse gradients cannot be sent in asynchronous mode: use dense embeddings")
        early, every = frozenset(self._filled), range(len(self._buckets))
        for k in every:
            if k not in early:
                self._leave(k)
        self._send_copied(wait=True)
        self._begin()
        changed = self._changed(early)  # while the last of them are still on their way
        if changed:
            self.stop("gradients change between backward and step")
            for event in [self._fill(k) for k in every]:
                event.synchronize()
        return [p.grad is not None for p in self._parameters], [self._flat] if changed else []

    def _changed(self, early: Iterable[int]) -> bool:
        """Whether anything in these buckets differs from what is there now. Versions of tensors would not show it all:
        ``p.grad.data`` has its own."""
        self._device.current_stream().wait_stream(self._stream)
        left = [i for k in early for i in self._buckets[k].members]
        pairs = [(self._parameters[i].grad, self._windows[i]) for i in left]
        if any(now is None or now.dtype != then.dtype for now, then in pairs):
            return True
        words = [_WORDS.get(then.element_size(), then.dtype) for _, then in pairs]  # so that NaN equals NaN
        pairs = [(now.view(word), then.view(word)) for (now, then), word in zip(pairs, words, strict=True)]
        if self._staged is self._flat:
            return not all(torch.equal(now, then) for now, then in pairs)
        return bool(pairs) and bool(torch.stack([now.ne(then).any() for now, then in pairs]).any())

    def took(self, seconds: float) -> None:
        """Note how long the step was: while early sending is tried, that decides."""
        if self._hooks and self._trial is not None:
            faster = self._trial.took(seconds)
            if faster:
                self._trial = None
            elif faster is not None:
                self.stop("steps are not faster when gradients leave early")

    def stop(self, reason: str) -> None:
        """Have nothing leave early any more."""
        if self._hooks:
            log.debug("from now on gradients leave at optimizer.step(), not before: %s", reason)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
