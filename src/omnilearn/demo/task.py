"""What the demo trains, the same for both of its scripts: digits, a small CNN, an accuracy to reach.

The digits come from a file that the demo wrote beforehand: a worker with a seventh of a core would need ten seconds to
import scikit-learn for them.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from omnilearn.bench.models import Cnn
from omnilearn.cluster.resources import cores
from omnilearn.observe import EventLog


def arguments() -> argparse.Namespace:
    """What the demo tells its scripts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="digits.pt")
    parser.add_argument("--epochs", type=int, default=10, help="at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, at most")
    parser.add_argument("--target", type=float, default=0.97, help="test accuracy to reach")
    parser.add_argument("--batch", type=int, default=128, help="all workers together")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--width", type=int, default=48, help="of the CNN")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync", help="of OmniLearn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cores", default="", help="of each worker, once all are ready")
    return parser.parse_args()


def digits(path: Path) -> tuple[TensorDataset, TensorDataset]:
    """Handwritten digits, 8×8 pixels: 1437 to train on, 360 to test with."""
    data = torch.load(path)
    return TensorDataset(*data["train"]), TensorDataset(*data["test"])


def cnn(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Cnn(width=width)


def ready(args: argparse.Namespace) -> None:
    """Wait until everybody has loaded PyTorch, then have the cluster's limits begin.

    The workers start with equal cores: a seventh of a core would need half a minute to load PyTorch. The launcher's
    schedule changes them when step 1 is announced, here.
    """
    import torch._dynamo  # DistributedDataParallel would load it later, with whatever cores are left  # noqa: F401

    dist.init_process_group("gloo")
    dist.barrier()
    if not args.cores:
        return
    if dist.get_rank() == 0:
        with open(os.environ["OMNILEARN_PROGRESS"], "r+b") as file:
            file.write((1).to_bytes(8, "little"))
    mine, deadline = float(args.cores.split(",")[dist.get_rank()]), time.monotonic() + 2
    while abs(cores() - mine) > 0.01 and time.monotonic() < deadline:  # a throttled worker sees no limit
        time.sleep(0.01)
    dist.barrier()


def leave() -> None:
    """The end of a script, when its model is out of scope.

    A DistributedDataParallel that outlives the process group takes it down while holding Python's lock, which gloo's
    threads may need just then: workers with few cores were seen to hang so. (torch releases the lock where Python
    itself lets go of the group: pytorch/pytorch#154976.)
    """
    gc.collect()
    dist.destroy_process_group()


class Progress:
    """Counts the seconds of training, evaluations left out, and decides when to stop."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self._args, self._rank = args, rank
        self._events = EventLog(os.environ.get("OMNILEARN_LOG_DIR"), rank)
        self.seconds = 0.0
        self._since = time.perf_counter()

    def begin_epoch(self) -> None:
        self._since = time.perf_counter()

    def end_epoch(self) -> None:
        self.seconds += time.perf_counter() - self._since

    def enough(self, epoch: int, accuracy: float, seconds: float) -> bool:
        """Note the accuracy after ``epoch``; whether it suffices, or time is over. The same values on all ranks."""
        reached = bool(accuracy >= self._args.target)
        if self._rank == 0:
            self._events.write("metric", epoch=epoch, seconds=round(seconds, 3), accuracy=accuracy, reached=reached)
        return reached or bool(seconds >= self._args.seconds)
