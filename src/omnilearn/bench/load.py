"""Other work on a worker's device: what a machine that is shared with others does to a training run.

One byte per worker, in a file that all of them can read, says whose device is busy with something else. A busy
worker's device multiplies matrices without end, beside the training and in the same share of the card (or of the
cores), which a process of its own would not have.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

import torch

LOOK = 0.003
"""Seconds between two looks at the file."""
SIDE = {"cuda": 5120, "cpu": 512}
"""Of the matrices: a product takes less than a millisecond on half of an H200, some on a core."""
AHEAD = 2
"""Products that wait in the card's queue, so that it never runs dry."""


class Load(threading.Thread):
    """Keeps ``device`` busy whenever byte ``rank`` of the file is set. Ends with the process, or when ``over``."""

    def __init__(self, path: Path, rank: int, device: torch.device) -> None:
        super().__init__(name="omnilearn-bench-load", daemon=True)
        self._path, self._rank, self._device = path, rank, device
        self.rounds, self.over = 0, threading.Event()

    def run(self) -> None:
        side, cuda = SIDE[self._device.type], self._device.type == "cuda"
        kind = torch.bfloat16 if cuda else torch.float32
        file = os.open(self._path, os.O_RDONLY)
        queued: deque[Any] = deque()
        stream = torch.cuda.Stream(self._device) if cuda else None
        with torch.cuda.stream(stream), torch.no_grad():
            a = torch.randn(side, side, device=self._device, dtype=kind)
            product = torch.empty_like(a)
            while not self.over.is_set():
                if os.pread(file, 1, self._rank) != b"\1":
                    self.over.wait(LOOK)
                    continue
                torch.mm(a, a, out=product)
                self.rounds += 1
                if cuda:
                    queued.append(torch.cuda.Event(blocking=True))
                    queued[-1].record(stream)
                    if len(queued) > AHEAD:
                        queued.popleft().synchronize()
        os.close(file)
