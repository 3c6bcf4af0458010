"""One injector for all fault tests. A fault leaves a mark in a file when it fires, so that a test sees that it did.

``Faults("kill", rank=1, step=3, mark=path)`` is called once per step by the training loop under test.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KINDS = ("kill", "freeze", "slow", "exception", "nan")


class InjectedError(ValueError):
    """What a user's code might raise."""


class Faults:
    """``loss = faults(loss)`` in every step: kills, freezes, slows, raises or spoils the loss, on one rank, once."""

    def __init__(self, kind: str, rank: int, step: int, mark: str | Path) -> None:
        assert kind in KINDS
        self.kind, self.rank, self.at, self.mark = kind, rank, step, Path(mark)
        self.step = 0

    def __call__(self, loss: torch.Tensor) -> Any:
        self.step += 1
        if int(os.environ["RANK"]) != self.rank or self.step != self.at or self.mark.exists():
            return loss
        self.mark.write_text(f"{self.kind} {os.getpid()} {time.time()}")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.kind == "slow":
            time.sleep(1)
        if self.kind == "exception":
            raise InjectedError("disk on fire")
        return loss * float("nan") if self.kind == "nan" else loss

    @property
    def fired(self) -> bool:
        return self.mark.exists() and self.mark.read_text().startswith(self.kind)

    @property
    def pid(self) -> int:
        return int(self.mark.read_text().split()[1])

    @property
    def when(self) -> float:
        return float(self.mark.read_text().split()[2])
