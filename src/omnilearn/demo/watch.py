"""Events of a plain DDP loop, which has nobody to write them: who computed how long, and who waited."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict

import torch
import torch.distributed as dist

from omnilearn.cluster.resources import detect
from omnilearn.data import Sampler, Share
from omnilearn.observe import EventLog
from omnilearn.pytorch.clock import Clock

EVERY = 0.25  # seconds between two entries


class Watch:
    """Call ``backward`` before and ``step`` after the backward pass of each step."""

    def __init__(self, args: argparse.Namespace, order: Sampler) -> None:
        self._rank, workers = dist.get_rank(), dist.get_world_size()
        self._events = EventLog(os.environ.get("OMNILEARN_LOG_DIR"), self._rank)
        self._clock = Clock(torch.device("cpu"))
        self._order = order
        self._rows: list[tuple[int, float, float]] = []
        self._first, self._written = 0, time.monotonic()
        found: list[dict[str, object]] = [{}] * workers
        dist.all_gather_object(found, asdict(detect()))
        if self._rank == 0:
            options = {"global_batch": args.batch, "policy": "DDP"}
            self._events.write("run", mode="sync", options=options, workers=found)
            batches = order.batches_at(0)
            self._events.write("plan", step=0, batches=batches, parked=[], reason="uniform")

    def epoch(self, epoch: int) -> None:
        self._clock.restart()
        if self._rank == 0:
            self._events.write("epoch", epoch=epoch, step=self._order.step, steps=self._order.steps)

    def backward(self, loss: torch.Tensor) -> None:
        self._clock.watch(loss)

    def step(self, share: Share) -> None:
        self._clock.reduced()
        timing = self._clock.take()
        self._rows.append((share.sizes[self._rank], timing.busy if timing else 0.0, timing.wait if timing else 0.0))
        if time.monotonic() - self._written > EVERY:
            self._write()

    def end(self) -> None:
        self._write()
        self._events.write("end", ok=True)

    def _write(self) -> None:
        if self._rows:
            batch, busy, wait = zip(*self._rows, strict=True)
            self._events.write(
                "steps",
                step=self._first,
                batch=batch,
                busy=[round(seconds, 6) for seconds in busy],
                wait=[round(seconds, 6) for seconds in wait],
            )
            self._first += len(self._rows)
            self._rows.clear()
        self._written = time.monotonic()
