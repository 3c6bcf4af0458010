"""One PyTorch worker of a benchmark's gang. Run as ``python -m omnilearn.bench.member FD RANK SIZE``."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from omnilearn.bench.contestants import (
    TIMEOUT,
    AsyncOmni,
    Job,
    Omni,
    Plain,
    StepOmni,
    largest_pass,
    local_steps,
    pass_needs,
)
from omnilearn.bench.load import Load
from omnilearn.bench.names import Size
from omnilearn.bench.scarcity import Scarcity
from omnilearn.bench.service import Member, named_policy, serve
from omnilearn.bench.workloads import Pool, workload
from omnilearn.pytorch.model import smallest_batch

TESTED, TESTED_AT_ONCE = 360, 60
POOL = 4
"""Global batches of data that are held."""


class Worker(Member):
    omni, local_steps = Omni, local_steps

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.device = torch.device("cpu")
        self.scarcity: Scarcity | None = None

    def ready(self, devices: list[str], told: Path) -> dict[str, Any]:
        torch.set_flush_denormal(True)  # numbers next to zero are slow to compute with
        # torch imports its compiler with the first optimizer, which takes long on a part of a core.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        self.device = torch.device(devices[self.rank])
        if self.device.type == "cuda":
            self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)
        return super().ready(devices, told)

    def share_device(self, path: str) -> None:
        """From now on other work is done on this worker's device whenever the file says so."""
        Load(Path(path), self.rank, self.device).start()

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def begin(self, address: str, port: int, name: str, size: str | Size, watch: bool) -> int:
        """Meet the others and get the data of a workload: the start of a session. Returns the model's least batch."""
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            WORLD_SIZE=str(self.size),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        if self.size > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
        what = workload(name, size)
        pool = what.dataset(POOL * what.global_batch)
        assert isinstance(pool, Pool)
        pool = Pool(pool.x.to(self.device), pool.y.to(self.device), len(pool))  # training is timed, not loading
        self.job = Job(what, pool, self.device, self.rank, self.size, watch, self.follow)
        return smallest_batch(what.model())

    def end(self) -> None:
        self.forget()
        if dist.is_initialized():
            dist.destroy_process_group()

    def open_plain(self, name: str, options: dict[str, Any]) -> None:
        own_card = self.device.type == "cuda" and torch.cuda.device_count() >= self.size
        self.contestants[name] = Plain(self._job, backend="nccl" if own_card else "gloo", **options)

    def open_async(self, name: str, steps: int, policy: str, options: dict[str, Any]) -> None:
        self.contestants[name] = AsyncOmni(self._job, steps, named_policy(policy), **options)

    def open_step(self, name: str, steps: int, policy: str, options: dict[str, Any]) -> None:
        self.contestants[name] = StepOmni(self._job, steps, named_policy(policy), **options)

    def need(self, rank: int, size: int) -> int | None:
        return pass_needs(self._job, size) if rank == self.rank else None

    def largest(self, rank: int, most: int, least: int) -> int | None:
        return largest_pass(self._job, most, least) if rank == self.rank else None

    def scarce(self, rank: int, room: int | None) -> None:
        """Leave worker ``rank`` room for so many bytes more than it uses now; None: as much as there is."""
        if rank != self.rank:
            return
        gc.collect()
        self.scarcity = self.scarcity or Scarcity()
        self.scarcity.lift()
        if room is not None:
            self.scarcity.begin(room, self.device)

    def accuracy(self, name: str, rank: int) -> float | None:
        """Of a classifier or of predicted tokens, as worker ``rank`` has it: on samples it was not trained with, where
        there are any."""
        if rank != self.rank:
            return None
        model = self.contestants[name].model
        held_out = self._job.workload.test
        test = held_out() if held_out is not None else self._job.pool
        model.eval()
        with torch.no_grad():
            parts = [model(x.to(self.device)).argmax(-1) for x in test.x[:TESTED].split(TESTED_AT_ONCE)]
        model.train()
        return float((torch.cat(parts).cpu() == test.y[:TESTED].cpu()).float().mean())


if __name__ == "__main__":
    serve(Worker)
