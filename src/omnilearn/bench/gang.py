"""The workers a benchmark commands: real processes of an emulated cluster, started once and used for everything.

    with Gang(4) as gang:
        gang.level("HL8")
        with gang.session("heavy"):
            gang.all("open_omni", "optimal", 12, "optimal", {})
            trace = gang.block("optimal")

A *session* is one process group and one workload. Within it contestants are opened once and take turns in blocks of
steps. Every wait has a time limit and says what it waited for; nothing is left behind, whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

import omnilearn
from omnilearn.bench.block import Block
from omnilearn.bench.names import Size, workload
from omnilearn.cluster import cgroup
from omnilearn.cluster.emulation import Emulation, Worker, level, scaled
from omnilearn.cluster.emulator import Emulator
from omnilearn.cluster.ports import free_ports
from omnilearn.cluster.resources import cores
from omnilearn.errors import OmniLearnError

THREADS = "threads"
"""A file with one byte per worker: how many threads it computes with. Workers look at it before every step."""
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}
"""For glibc: what a step frees is kept for the next. Else some contestants, by chance, give tens of megabytes back to
the system in every step and are a tenth slower for it, with the same batches."""
LIMIT = 300.0
"""Seconds to wait for an answer."""

Batches = tuple[int, ...]
Floats = npt.NDArray[np.float64]


class GangError(OmniLearnError):
    """A worker of the benchmark failed, ended or did not answer."""


@dataclass(frozen=True)
class Trace:
    """Some steps as the whole gang saw them: a step lasts from the last worker's end of one to that of the next."""

    first: int
    seconds: Floats
    batches: list[Batches]
    busy: Floats  # steps × workers; nan where it is not known
    wait: Floats
    total: float

    @staticmethod
    def of(blocks: Sequence[Block]) -> Trace:
        steps = sorted({step for block in blocks for step in block.ends})
        ends = [max(block.ends[step] for block in blocks if step in block.ends) for step in steps]
        # A slow worker may end its last step before it is parked after the others ended the next one.
        ends = np.maximum.accumulate(ends).tolist()
        begin = max(block.begin for block in blocks if block.ends)

        def table(name: str) -> Floats:
            return np.array([[getattr(block, name).get(step, np.nan) for block in blocks] for step in steps])

        return Trace(
            first=steps[0],
            seconds=np.diff([begin, *ends]),
            batches=[tuple(block.samples.get(step, 0) for block in blocks) for step in steps],
            busy=table("busy"),
            wait=table("wait"),
            total=max(block.end for block in blocks if block.ends) - begin,
        )

    def after(self, steps: int) -> Trace:
        """Without the first steps."""
        return Trace(
            self.first + steps,
            self.seconds[steps:],
            self.batches[steps:],
            self.busy[steps:],
            self.wait[steps:],
            float(self.seconds[steps:].sum()),
        )


def joined(traces: Sequence[Trace]) -> Trace:
    """One trace after the other."""
    return Trace(
        traces[0].first,
        np.concatenate([trace.seconds for trace in traces]),
        [batches for trace in traces for batches in trace.batches],
        np.concatenate([trace.busy for trace in traces]),
        np.concatenate([trace.wait for trace in traces]),
        sum(trace.total for trace in traces),
    )


class Gang:
    """Workers on this machine: ``size`` of them with equal shares, or those of an ``emulation``.

    ``links`` gives each a network of its own with so many bit/s, and a ``latency`` in seconds. ``keep_memory``: freed
    memory stays with the workers.
    """

    def __init__(
        self,
        size: int = 4,
        *,
        limited: bool = True,
        device: str = "cpu",
        links: Sequence[int] | None = None,
        latency: float | None = None,
        emulation: Emulation | None = None,
        framework: str = "pytorch",
        keep_memory: bool = True,
    ) -> None:
        share = scaled([1] * size, cores())
        # Shares change while workers run, which pinning to cores cannot do.
        by_group = emulation is not None or not limited or "cpu" in cgroup.parents(["cpu"])
        if emulation is None:
            each = [(share[k] if limited else None, links[k] if links else None) for k in range(size)]
            workers = (Worker(cpu=cpu, bandwidth=rate, latency=latency) for cpu, rate in each)
            emulation = Emulation("equal shares", tuple(workers))
        else:
            share = tuple(worker.cpu or 1.0 for worker in emulation.workers)
        self.emulator = Emulator(emulation, by="auto" if by_group else "throttle")
        self.size = emulation.nproc
        self.devices = [worker.device or ("cuda" if worker.mps else device) for worker in emulation.workers]
        self.shares: tuple[float, ...] = share
        alike = len(set(self.devices)) == 1
        self.nominal = tuple(worker.mps or share[k] if alike else 1.0 for k, worker in enumerate(emulation.workers))
        """What each worker is worth by its description, in any unit."""
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._store: Any = None
        self.framework = framework
        self._keep_memory = keep_memory
        self._ports = free_ports(self.size) if framework == "tensorflow" else []
        self._undo = contextlib.ExitStack()

    # Start and end

    def __enter__(self) -> Gang:
        with contextlib.ExitStack() as undo:
            _end_on_sigterm(undo)
            undo.enter_context(self.emulator)
            self._logs = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="omnilearn-bench-")))
            undo.callback(self._end)
            self.threads([max(1, math.floor(share + 0.1 + 1e-6)) for share in self.shares])
            for rank in range(self.size):
                self._start(rank)
            self.all("ready", self.devices, self._logs / THREADS, doing="the workers to start")
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _start(self, rank: int) -> None:
        mine, theirs = socket.socketpair()
        source = str(Path(omnilearn.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        module = "omnilearn.bench.tf_member" if self._ports else "omnilearn.bench.member"
        member = [sys.executable, "-m", module, str(theirs.fileno()), str(rank), str(self.size)]
        with theirs, open(self._logs / str(rank), "wb") as log:
            process = subprocess.Popen(
                self.emulator.command(rank, member, with_parent=threading.current_thread() is threading.main_thread()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for us; we end them
                env={
                    **(KEEP_MEMORY if self._keep_memory else {}),
                    **os.environ,
                    "PYTHONPATH": path,
                    "TOKENIZERS_PARALLELISM": "false",
                    **self._place(rank),
                },
            )
        self._processes.append(process)
        self._pipes.append(Connection(mine.detach()))

    def _place(self, rank: int) -> dict[str, str]:
        """TensorFlow's processes must know each other before they start."""
        if not self._ports:
            return {}
        workers = [f"{self.emulator.address(k)}:{port}" for k, port in enumerate(self._ports)]
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        return {"TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "2"} if self.size > 1 else {}

    def workload(self, name: str, size: str | Size = "small") -> Any:
        """What is trained under that name, in the gang's framework."""
        return workload(name, size, self.framework)

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(timeout=30)
        self._pipes, self._processes, self._store = [], [], None

    # Commands

    def all(self, request: str, *arguments: Any, doing: str = "", limit: float = LIMIT) -> list[Any]:
        """Every worker's answer to ``request``. ``doing`` says what was waited for when none comes."""
        for rank in range(self.size):
            self._send(rank, (request, arguments), doing or request)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        while len(answers) < self.size:
            late = [rank for rank in range(self.size) if rank not in answers]
            ready = wait([self._pipes[rank] for rank in late], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise GangError(
                    f"waited {limit:g} s for {doing or request}: no answer from rank {', '.join(map(str, late))}; "
                    f"is the machine very busy? Give fewer --levels or --model, or --quick"
                )
            for rank in (rank for rank in late if self._pipes[rank] in ready):
                answers[rank] = self._receive(rank, doing or request)
        return [answers[rank] for rank in range(self.size)]

    def _send(self, rank: int, message: Any, doing: str) -> None:
        try:
            self._pipes[rank].send(message)
        except OSError:
            raise self._died(rank, doing) from None

    def _receive(self, rank: int, doing: str) -> Any:
        try:
            how, answer = self._pipes[rank].recv()
        except (EOFError, OSError):
            raise self._died(rank, doing) from None
        if how == "refused":
            raise GangError(f"rank {rank}, at {doing}: {answer}")
        if how == "failed":
            raise GangError(f"rank {rank} failed at {doing}:\n{answer}")
        return answer

    def _died(self, rank: int, doing: str) -> GangError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(timeout=5)
        said = (self._logs / str(rank)).read_text(errors="replace").strip().splitlines()[-15:]
        status = self._processes[rank].returncode
        why = (
            "was killed, as Linux does where memory runs out,"
            if status == -signal.SIGKILL
            else f"ended (status {status})"
        )
        return GangError("\n  ".join([f"rank {rank} {why} at {doing}", *said]))

    # The cluster

    def level(self, name: str, mode: str = "sync") -> tuple[float, ...]:
        """Make this machine play one of the papers' levels from now on."""
        shares = level(name, cores(), mode)
        self.cpu(shares)
        return shares

    def cpu(self, shares: Sequence[float]) -> None:
        """Give the workers these cores from now on, also in the middle of a block; and a thread for each whole one."""
        self.shares = self.nominal = tuple(shares)
        self.emulator.change(cpu=list(shares))
        self.threads([max(1, math.floor(share + 1e-6)) for share in shares])

    def load(self, worker: int | None) -> None:
        """From now on another job keeps one worker's device busy, also in the middle of a block; None: nobody's."""
        path = self._logs / "load"
        first = not path.exists()
        path.write_bytes(bytes(rank == worker for rank in range(self.size)))
        if first:
            self.all("share_device", str(path), doing="other work to begin")

    def threads(self, counts: Sequence[int]) -> None:
        """What the workers compute with from their next step on."""
        file = os.open(self._logs / THREADS, os.O_WRONLY | os.O_CREAT)  # never empty: workers may look just now
        os.pwrite(file, bytes(min(count, 255) for count in counts), 0)
        os.close(file)

    @contextlib.contextmanager
    def session(self, workload: str, size: str | Size = "small", *, watch: bool = True) -> Iterator[int]:
        """A process group and a workload for the contestants to come. Yields the model's least batch."""
        address, port = self.emulator.host_address, 0
        if self.framework == "pytorch":
            from torch.distributed import TCPStore

            self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        begun = self.all("begin", address, port, workload, size, watch, doing=f"the session {workload}")
        yield begun[0]
        self.all("end", doing=f"the end of the session {workload}")
        self._store = None

    def block(self, name: str, *arguments: Any, limit: float = LIMIT) -> Trace:
        """Let a contestant train for a block."""
        return Trace.of(self.all("block", name, *arguments, doing=f"steps of {name}", limit=limit))


def _end_on_sigterm(undo: contextlib.ExitStack) -> None:
    """A polite request to end cleans up as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    undo.callback(signal.signal, signal.SIGTERM, before)
