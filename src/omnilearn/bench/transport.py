"""How much of what the transport can do does the asynchronous engine reach? Round trips of both, in turns.

Workers with nothing to compute push gradients and receive parameters as fast as they can: as on one host, where memory
is shared with the server, and as between hosts, where all of it is sent. Beside them two bare loops, the same processes
with the same messages in the same chunks over the same connections: one does nothing to what it receives; the other
does what has to be done with it, whatever the engine (the gradient is copied to be sent, the same optimizer applies
it, one at a time, and the parameters are copied for the answer). Processes are forked from this one, which has torch
loaded.
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

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import TCPStore

from omnilearn.bench.record import Row, median_and_spread
from omnilearn.errors import OmniLearnError
from omnilearn.pytorch import OmniLearn
from omnilearn.pytorch.asynchronous import wire
from omnilearn.pytorch.asynchronous.owner import Owner, Portrait
from omnilearn.pytorch.asynchronous.shared import SWITCH
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
    """Round trips per second, all workers together: the engine's, the bare loops', and the ratios of each round."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # torch loads its compiler here, once
    rates: dict[str, list[float]] = {}
    costs: list[float] = []
    for _ in range(rounds):
        for name, function, variant in (
            ("shared", _engine, "1"), ("messages", _bare, ""), ("sent", _engine, "0"), ("needed", _bare, "update"),
        ):  # fmt: skip
            with tempfile.TemporaryDirectory(prefix="omnilearn-bench-") as folder:
                results = _together(workers, function, parameters, seconds, variant, folder)
            rates.setdefault(name, []).append(sum(steps / spent for steps, spent, _ in results))
            if name == "shared":
                costs.append(1e3 * max(cpu for *_, cpu in results) / max(sum(steps for steps, *_ in results), 1))

    def ratio(ours: str, bare: str) -> Any:
        return median_and_spread(a / b for a, b in zip(rates[ours], rates[bare], strict=True))

    found = ratio("shared", "messages")
    return {
        "workers": workers,
        "parameters": parameters,
        "round_trips_per_s": float(np.median(rates["shared"])),
        "sent_per_s": float(np.median(rates["sent"])),
        "messages_per_s": float(np.median(rates["messages"])),
        "needed_per_s": float(np.median(rates["needed"])),
        "ratio": found["median"],
        "lower": found["lower"],
        "upper": found["upper"],
        "sent_vs_messages": ratio("sent", "messages")["median"],
        "sent_vs_needed": ratio("sent", "needed")["median"],
        "server_cpu_ms": float(np.median(costs)),
    }


def _together(workers: int, function: Callable[..., Any], *args: Any) -> list[tuple[int, float, float]]:
    """What the function returned in each of the workers' processes: steps, seconds, the server's CPU seconds."""
    context = mp.get_context("fork")
    pipes, processes = [], []
    for rank in range(workers):
        mine, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs, function, rank, workers, args), daemon=False)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)  # its threads must not be there at a fork
    for pipe in pipes:
        pipe.send(store.port)
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


def _child(pipe: Any, function: Callable[..., Any], rank: int, workers: int, args: Any) -> None:
    torch.set_num_threads(1)
    port = pipe.recv()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(workers), MASTER_ADDR=ADDRESS, MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", OMNILEARN_DEVICE="cpu",
    )  # fmt: skip
    pipe.send(function(rank, workers, port, *args))


def _engine(rank: int, workers: int, port: int, parameters: int, seconds: float, sharing: str, folder: str) -> Any:
    os.environ[SWITCH] = sharing
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


def _bare(rank: int, workers: int, port: int, parameters: int, seconds: float, variant: str, _: str) -> Any:
    """The same messages. Rank 0's process has a child that answers."""
    store = TCPStore(ADDRESS, port, is_master=False, timeout=LIMIT)
    if rank == 0 and not os.fork():
        try:
            _echo(workers, port, parameters, update=bool(variant))
        finally:
            os._exit(0)
    portrait = Portrait(Ballast(parameters))
    gradient, outbox = portrait.values.empty(), torch.zeros(portrait.message, dtype=torch.uint8)
    values = portrait.values.empty()
    pair = Pair(store, f"bare-{rank}", 1, dist.ProcessGroupGloo.create_device(hostname=ADDRESS), LIMIT)
    steps, begin = -1, time.perf_counter()
    store.add("ready", 1)
    while store.add("ready", 0) < workers:
        time.sleep(0.001)
    while True:
        if variant:
            outbox[: len(gradient)].copy_(gradient)
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


def _echo(workers: int, port: int, parameters: int, update: bool) -> None:
    # After a fork torch makes its pool of threads anew, and not for two at once: now, before there are threads.
    torch.set_num_threads(1)
    model, lock = Ballast(parameters), threading.Lock()
    portrait, optimizer = Portrait(model), torch.optim.SGD(model.parameters(), lr=0.1)
    owner = Owner(model, optimizer, ())

    def answer(rank: int) -> None:
        device = dist.ProcessGroupGloo.create_device(hostname=ADDRESS)
        pair = Pair(TCPStore(ADDRESS, port, is_master=False, timeout=LIMIT), f"bare-{rank}", 0, device, LIMIT)
        inbox = torch.zeros(portrait.message, dtype=torch.uint8)
        values = inbox[: portrait.values.size]
        gradients = portrait.values.views(values)
        try:
            while True:
                pair.receive_header((wire.PUSH,))
                pair.receive([inbox])
                if update:
                    with lock:
                        owner.apply(gradients, [1] * len(gradients), 1.0)
                        values.copy_(owner.values)
                pair.send(Header(wire.OK), [values])
        except wire.Disconnected:
            pair.close()

    threads = [threading.Thread(target=answer, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
