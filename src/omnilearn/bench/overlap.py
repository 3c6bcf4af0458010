"""What is it worth that gradients leave while the backward pass still runs? A worker and its server, a link between.

Both have a network of their own, and the worker's has a limited rate. Its batch is such that a backward pass takes
about as long as a gradient needs on the link: there, most can be gained. Early and not, in turns, in the same
processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import TensorDataset

from omnilearn.bench.arguments import positive
from omnilearn.bench.progress import Progress
from omnilearn.bench.record import Record, Row, median_and_spread
from omnilearn.cluster import units
from omnilearn.cluster.emulation import Emulation, Worker
from omnilearn.cluster.emulator import Emulator
from omnilearn.errors import OmniLearnError
from omnilearn.pytorch import OmniLearn
from omnilearn.pytorch.asynchronous.gradient import SWITCH

RATES = ("2Gbit", "1Gbit")
LAYERS, WIDTH = 10, 1000
CONTESTANTS = {"0": "at the step", "1": "early"}
"""By the switch that makes them so."""
WARM_UP = 3
LIMIT = 600.0
"""Seconds that all turns at one rate may take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", help=f"of the worker's link (default: {','.join(RATES)}; quick: 2Gbit)")
    parser.add_argument("--rounds", type=positive, help="how often both take their turn (default: 4, quick: 1)")


def run(args: argparse.Namespace) -> Record:
    words = args.rates.split(",") if args.rates else RATES[:1] if args.quick else RATES
    rates = {word.strip(): units.rate("--rates", word) for word in words}
    rounds, steps = args.rounds or (1 if args.quick else 4), 4 if args.quick else 10
    torch.set_num_threads(1)
    rows: list[Row] = []
    summary: dict[str, Any] = {"parameters": LAYERS * WIDTH**2}
    with Progress("overlap", len(rates)) as progress:
        for word, rate in rates.items():
            batch = _batch(seconds=LAYERS * WIDTH**2 * 32 / rate)
            seconds = {early: np.array(found) for early, found in _turns(rate, batch, rounds, steps).items()}
            for early, name in CONTESTANTS.items():
                ratio = median_and_spread(seconds[early] / seconds["0"])
                rows.append({"link": word, "contestant": name, "step_ms": 1e3 * float(np.median(seconds[early])),
                             "ratio": ratio["median"], "lower": ratio["lower"], "upper": ratio["upper"],
                             "batch": batch})  # fmt: skip
            summary["step_time_ratio"] = max(row["ratio"] for row in rows if row["contestant"] == CONTESTANTS["1"])
            Record("overlap", rows, summary).keep(args.json)
            progress.done(word)
    return Record("overlap", rows, summary)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _batch(seconds: float) -> int:
    """So many samples that a backward pass takes about so long here."""
    model, size, times = _model(), 64, []
    for _ in range(5):
        loss = model(torch.randn(size, WIDTH)).square().mean()
        begin = time.perf_counter()
        loss.backward()
        times.append(time.perf_counter() - begin)
    return max(1, round(size * seconds / float(np.median(times))))


def _turns(rate: int, batch: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step in each round, by contestant."""
    emulation = Emulation("a link", (Worker(), Worker(bandwidth=rate)))
    command = [sys.executable, "-m", __name__, str(batch), str(rounds), str(steps)]
    with Emulator(emulation) as emulator, tempfile.TemporaryDirectory(prefix="omnilearn-bench-") as folder:
        store = TCPStore(emulator.host_address, 0, is_master=True, wait_for_workers=False)
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": emulator.host_address, "MASTER_PORT": str(store.port),
                   "TORCHELASTIC_USE_AGENT_STORE": "True", "OMNILEARN_DEVICE": "cpu",
                   "OMNILEARN_LOG_DIR": folder}  # fmt: skip
        processes = [
            subprocess.Popen(
                emulator.command(rank, command, with_parent=True),
                stdout=subprocess.PIPE,
                env={**os.environ, **meeting, "RANK": str(rank), "TORCH_CPP_LOG_LEVEL": "ERROR"},
            )
            for rank in range(2)
        ]
        try:
            told, _ = processes[1].communicate(timeout=LIMIT)
            if processes[1].returncode or processes[0].wait(timeout=LIMIT):
                raise OmniLearnError("a worker of the overlap benchmark failed: see above")
        except subprocess.TimeoutExpired:
            raise OmniLearnError(f"the overlap benchmark did not end within {LIMIT:g} s: see above") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found: dict[str, list[float]] = json.loads(told)
        return found


def _work(batch: int, rounds: int, steps: int) -> None:
    """Rank 0 has the server and leaves the work to rank 1."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {switch: [] for switch in CONTESTANTS}
    data = TensorDataset(torch.randn(batch * (steps + WARM_UP), WIDTH))
    for _ in range(rounds):
        for early, found in seconds.items():
            os.environ[SWITCH] = early
            found.append(_step_seconds(batch, data))
    if os.environ["RANK"] == "1":
        print(json.dumps(seconds))


def _step_seconds(batch: int, data: Any) -> float:
    ends = []
    with OmniLearn(2 * batch, mode="async", policy="uniform", lr_scaling="none", timeout=LIMIT) as omni:
        model: Any = _model()
        model, optimizer = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        for (x,) in omni.loader(data, check_data=False):
            if omni.rank == 0:
                break
            omni.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
    return float(np.median(np.diff(ends)[WARM_UP - 1 :])) if ends else 0.0


if __name__ == "__main__":
    _work(*map(int, sys.argv[1:]))
