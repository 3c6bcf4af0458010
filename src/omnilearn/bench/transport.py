"""How much of what the transport can do does the asynchronous engine reach? Round trips of both, side by side.

Workers with nothing to compute push gradients and receive parameters as fast as they can; beside it the same messages
over the same kind of connection, with nothing done to them. Processes are forked from this one, which has torch loaded.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

from omnilearn.bench.record import Row, median_and_spread
from omnilearn.errors import OmniLearnError
from omnilearn.pytorch import OmniLearn
from omnilearn.pytorch.asynchronous import wire
from omnilearn.pytorch.asynchronous.owner import Portrait
from omnilearn.pytorch.asynchronous.wire import Header, Pair

LIMIT = timedelta(seconds=60)
ADDRESS = "127.0.0.1"
TICKS = os.sysconf("SC_CLK_TCK")


class Ballast(nn.Module):
    """So many parameters that take no time to differentiate."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.one, self.rest = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(parameters - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one.sum()


class Endless(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.zeros(1)


def measure(workers: int, parameters: int, seconds: float, rounds: int) -> Row:
    """Round trips per second, all workers together: the engine's, the bare transport's, and their ratio."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # torch loads its compiler here, once
    ours, bare, cost = [], [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="omnilearn-bench-") as folder:
            results = _together(workers, _engine, parameters, seconds, folder)
        ours.append(sum(steps / spent for steps, spent, _ in results))
        cost.append(1e3 * max(cpu for _, _, cpu in results) / max(sum(steps for steps, _, _ in results), 1))
        results = _together(workers, _bare, parameters, seconds, "")
        bare.append(sum(steps / spent for steps, spent, _ in results))
    ratio = median_and_spread(a / b for a, b in zip(ours, bare, strict=True))
    return {
        "workers": workers,
        "parameters": parameters,
        "round_trips_per_s": median_and_spread(ours)["median"],
        "transport_per_s": median_and_spread(bare)["median"],
        "ratio": ratio["median"],
        "lower": ratio["lower"],
        "upper": ratio["upper"],
        "server_cpu_ms": median_and_spread(cost)["median"],
    }


def _together(workers: int, function: Callable[..., Any], *args: Any) -> list[tuple[int, float, float]]:
    """What the function returned in each of the workers' processes: steps, seconds, the server's CPU seconds."""
    context = mp.get_context("fork")
    store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(workers):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(theirs, function, rank, workers, store.port, args), daemon=False)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(LIMIT.total_seconds() + args[1]):
                raise OmniLearnError(f"worker {rank} of the transport benchmark did not answer in time")
            try:
                results.append(pipe.recv())
            except EOFError:
                raise OmniLearnError(f"worker {rank} of the transport benchmark failed: see above") from None
        return results
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)


def _child(pipe: Any, function: Callable[..., Any], rank: int, workers: int, port: int, args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(workers), MASTER_ADDR=ADDRESS, MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", OMNILEARN_DEVICE="cpu",
    )  # fmt: skip
    pipe.send(function(rank, workers, port, *args))


def _engine(rank: int, workers: int, port: int, parameters: int, seconds: float, folder: str) -> Any:
    model = Ballast(parameters)
    omni = OmniLearn(workers, mode="async", policy="uniform", log_dir=folder, timeout=LIMIT.total_seconds())
    wrapped, optimizer = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.rest.grad = torch.zeros_like(model.rest)
    loader = omni.loader(Endless())
    steps, spent, before = -1, 0.0, 0.0
    for x in loader:
        omni.backward(wrapped(x))
        begin = time.perf_counter()
        optimizer.step()
        steps += 1
        if steps == 0:  # the first one waits for everybody to be there
            before = _cpu_seconds(folder)
            continue
        spent += time.perf_counter() - begin  # the round trip alone, without the loop around it
        if spent > seconds:
            break
    cpu = _cpu_seconds(folder) - before
    omni.close()
    return steps, spent, cpu


def _cpu_seconds(folder: str) -> float:
    pid = json.loads(Path(folder, "server.json").read_text())["pid"]
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _bare(rank: int, workers: int, port: int, parameters: int, seconds: float, _: str) -> Any:
    """The same messages, and nothing else. Rank 0's process has a child that answers."""
    store = TCPStore(ADDRESS, port, is_master=False, timeout=LIMIT)
    if rank == 0 and not os.fork():
        try:
            _echo(workers, port, parameters)
        finally:
            os._exit(0)
    portrait = Portrait(Ballast(parameters))
    outbox = torch.zeros(portrait.values.size + portrait.flags, dtype=torch.uint8)
    values = portrait.values.empty()
    pair = Pair(store, f"bare-{rank}", 1, ADDRESS, LIMIT)
    steps, begin = -1, time.perf_counter()
    store.add("ready", 1)
    while store.add("ready", 0) < workers:
        time.sleep(0.001)
    while True:
        pair.send(Header(wire.PUSH), [outbox])
        pair.receive_header((wire.OK,))
        pair.receive([values])
        steps += 1
        if steps == 0:
            begin = time.perf_counter()
        elif time.perf_counter() - begin > seconds:
            break
    spent = time.perf_counter() - begin
    pair.close()
    return steps, spent, 0.0


def _echo(workers: int, port: int, parameters: int) -> None:
    portrait = Portrait(Ballast(parameters))

    def answer(rank: int) -> None:
        pair = Pair(TCPStore(ADDRESS, port, is_master=False, timeout=LIMIT), f"bare-{rank}", 0, ADDRESS, LIMIT)
        inbox = torch.zeros(portrait.values.size + portrait.flags, dtype=torch.uint8)
        try:
            while True:
                pair.receive_header((wire.PUSH,))
                pair.receive([inbox])
                pair.send(Header(wire.OK), [inbox[: portrait.values.size]])
        except wire.Disconnected:
            pair.close()

    threads = [threading.Thread(target=answer, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
