"""What the tests of asynchronous mode share: a model that counts its samples, and processes that may be killed."""

from __future__ import annotations

import json
import logging
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import Dataset

from omnilearn import OmniLearn

SECONDS = 60.0
"""A guard against hanging; a quiet machine needs one or two."""


class OneHot(Dataset[Any]):
    """Sample i is the i-th unit vector."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> torch.Tensor:
        vector = torch.zeros(self.size, dtype=torch.float64)
        vector[i] = 1
        return vector


class Counter(nn.Module):
    """After training with ``count_loss`` and a learning rate of 1, weight i is minus the times sample i was used."""

    def __init__(self, size: int, ballast: int = 0) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        self.ballast = nn.Parameter(torch.zeros(ballast)) if ballast else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = (x * self.uses).sum()
        return total if self.ballast is None else total + self.ballast.sum() * 0


def uses(model: Any) -> list[float]:
    return [-value for value in model.uses.tolist()]


def counting(size: int, **options: Any) -> tuple[OmniLearn, Any, Any, Any]:
    """An OmniLearn object, model, optimizer and loader for counting."""
    ballast, workers = options.pop("ballast", 0), options.pop("num_workers", 0)
    options = {"lr_scaling": "none", "policy": "uniform", "mode": "async", "timeout": SECONDS, **options}
    if options.get("mode") == "sync":
        options.pop("lr_scaling", None)
    omni = OmniLearn(options.pop("global_batch", 24), **options)
    model = Counter(size, ballast)
    model, optimizer = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return omni, model, optimizer, omni.loader(OneHot(size), shuffle=True, num_workers=workers)


def count_epochs(
    model: Any, optimizer: Any, omni: Any, loader: Any, epochs: int, each: Callable[[], Any] = lambda: None
) -> None:
    for _ in range(epochs):
        for x in loader:
            omni.backward(model(x))
            each()
            optimizer.step()
            optimizer.zero_grad()


class Crew:
    """Processes forked from this one, which has torch loaded: they start at once, and a test may kill them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # torch loads its compiler with the first optimizer, which takes seconds: here, once, for all.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: dict[str, Any] = {}

    def start(self, name: str, function: Any, *args: Any, rank: int = 0, size: int = 1, **settings: str) -> Any:
        environment = {
            "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "OMNILEARN_LOG_DIR": str(self.folder), **settings,
        }  # fmt: skip
        process = mp.get_context("fork").Process(target=self._run, args=(name, function, args, environment))
        process.start()
        self.processes[name] = process
        return process

    def _run(self, name: str, function: Any, args: Any, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        torch.set_num_threads(1)
        with open(self.folder / f"{name}.txt", "w", buffering=1) as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.stdout = sys.stderr = said
            logging.basicConfig(stream=said, force=True)
            try:
                (self.folder / f"{name}.json").write_text(json.dumps(function(self.folder, *args)))
            except BaseException:
                traceback.print_exc(file=said)
                raise SystemExit(1) from None

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def result(self, name: str) -> Any:
        """What the process returned; it must have ended well."""
        self.wait(lambda: not self.processes[name].is_alive(), f"{name} to end")
        assert self.processes[name].exitcode == 0, self.said(name)
        return json.loads((self.folder / f"{name}.json").read_text())

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}\n" + "\n".join(map(self.said, self.processes))
            time.sleep(0.02)

    @property
    def server(self) -> dict[str, Any]:
        """Where the server is, and its process."""
        path = self.folder / "server.json"
        self.wait(lambda: path.exists() and path.read_text().endswith("\n"), "the server")
        return dict(json.loads(path.read_text()))

    def mark(self, name: str) -> bool:
        return (self.folder / name).exists()


@contextmanager
def crew(folder: Path) -> Iterator[Crew]:
    team = Crew(folder)
    try:
        yield team
    finally:
        for process in team.processes.values():
            process.kill()
            process.join(10)
        path = folder / "server.json"
        if path.exists():  # it ends by itself, soon after the last worker
            pid = json.loads(path.read_text())["pid"]
            team.wait(lambda: not _runs(pid), "the server to end")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
