"""Starts TensorFlow's processes, each with its TF_CONFIG, waits for them, and says what went wrong first.

TensorFlow has no launcher of its own. Ports are found; a TF_CONFIG that is set already (Kubernetes, Vertex) is the
cluster's and stays as it is: then one process is started, in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from omnilearn.cluster.console import console
from omnilearn.cluster.emulator import Emulator
from omnilearn.cluster.launch import Interrupted, _ignore_signals, _report
from omnilearn.cluster.ports import free_ports
from omnilearn.errors import UsageError

GRACE = 12.0
"""Seconds that others have to notice a failure and say so: TensorFlow's heartbeat takes 10."""
FORCE = 5.0
"""Seconds between asking a process to end and killing it."""
POLL = 0.05
NOISE = ("WARNING: All log messages before absl::InitializeLog", "oneDNN custom operations are on")
"""What every TensorFlow process says at its start; the log files have it."""
OURS = ("help", "log_dir", "nproc_per_node", "module", "no_python", "training_script", "training_script_args")


def plain_parser() -> argparse.ArgumentParser:
    """The part of torchrun's arguments that is understood here, for those who have no torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", "--nproc_per_node")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module")
    parser.add_argument("--no-python", "--no_python", action="store_true", help="the script is a program")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def check(args: argparse.Namespace, defaults: dict[str, Any]) -> int | None:
    """The number of workers asked for (None: nothing was said); refuses torchrun's other options."""
    for name, default in defaults.items():
        if name not in OURS and getattr(args, name, default) != default:
            raise UsageError(
                f"--{name.replace('_', '-')} is torchrun's, which --framework tensorflow does not use; several hosts: "
                f"set TF_CONFIG on each (docs/launch.md)"
            )
    asked = args.nproc_per_node
    try:
        nproc = None if asked is None else int(asked)
    except ValueError:
        raise UsageError(f"--nproc {asked}: with --framework tensorflow it must be a number") from None
    if nproc is not None and nproc < 1:
        raise UsageError(f"--nproc {nproc}: at least one worker is needed")
    if args.ps < 0:
        raise UsageError(f"--ps {args.ps}: a number of parameter servers, 0 for none")
    if os.environ.get("TF_CONFIG", "").strip() and ((nproc or 1) > 1 or args.ps or args.emulate):
        raise UsageError(
            "TF_CONFIG is set: this process is one of a cluster that exists already: leave --nproc, --ps and --emulate "
            "out, or unset it"
        )
    return nproc


def command(args: argparse.Namespace) -> list[str]:
    python = [] if args.no_python else [sys.executable, *(["-m"] if args.module else [])]
    return [*python, args.training_script, *args.training_script_args]


@dataclass
class _Task:
    """One process: its place in the cluster, and where it says what it says."""

    kind: str
    index: int
    local_rank: int
    stderr: Path
    process: subprocess.Popen[str] | None = None
    readers: tuple[threading.Thread, ...] = ()

    @property
    def name(self) -> str:
        return f"rank {self.index}" if self.kind == "worker" else f"{self.kind} {self.index}"

    @property
    def exitcode(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    def signal_name(self) -> str:
        return signal.Signals(-(self.exitcode or 0)).name


def launch(argv: Sequence[str], ps: int, emulator: Emulator, log_dir: Path) -> int:
    """Run ``argv`` as every task of the cluster; returns the exit code, having said on stderr what failed."""
    nproc = emulator.emulation.nproc
    kinds = [("worker", k) for k in range(nproc)] + [("ps", k) for k in range(ps)] + ([("chief", 0)] if ps else [])
    (log_dir / "logs").mkdir(parents=True, exist_ok=True)
    tasks = [
        _Task(kind, k, k if kind == "worker" else -1, log_dir / "logs" / f"{kind}-{k}.stderr") for kind, k in kinds
    ]
    configs = _configs(tasks, emulator)
    out, err = sys.stdout, sys.stderr
    try:
        with console(out, err):
            for task, config in zip(tasks, configs, strict=True):
                _start(task, argv, config, emulator, nproc)
            failed = _wait(tasks)
            if failed:
                raise _Failed
        return 0
    except _Failed:
        # With parameter servers the chief trains: a worker's death is survived.
        decisive = {t.index: t for t in tasks if t.kind == "worker" and t.exitcode} if not ps else {}
        stderrs = {t.local_rank: str(t.stderr) for t in tasks}
        if decisive:
            return _report(decisive, stderrs, emulator, f"Logs: {log_dir}", "")
        first = next(t for t in tasks if t.exitcode and t.kind != "worker")
        _report({first.name: first}, {first.local_rank: str(first.stderr)}, emulator, f"Logs: {log_dir}", "")
        return max(1, first.exitcode or 1)
    except Interrupted as error:
        word = "interrupted" if error.number == signal.SIGINT else f"ended by {error}"
        print(f"omnilearn: {word}; all workers were ended. Logs: {log_dir}", file=err)
        return 128 + error.number
    finally:
        _ignore_signals()
        _end(tasks)
        emulator.kill()


class _Failed(Exception):
    """Leaves the console, which then keeps the tracebacks it holds back to itself."""


def _configs(tasks: Sequence[_Task], emulator: Emulator) -> list[str | None]:
    """A TF_CONFIG for each task, on ports that are free now; None where there is one already or none is needed."""
    if len(tasks) == 1 or os.environ.get("TF_CONFIG", "").strip():
        return [None] * len(tasks)
    cluster: dict[str, list[str]] = {}
    for task, port in zip(tasks, free_ports(len(tasks)), strict=True):
        address = emulator.address(task.index) if task.kind == "worker" else emulator.host_address
        cluster.setdefault(task.kind, []).append(f"{address}:{port}")
    return [json.dumps({"cluster": cluster, "task": {"type": t.kind, "index": t.index}}) for t in tasks]


def _start(task: _Task, argv: Sequence[str], config: str | None, emulator: Emulator, nproc: int) -> None:
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1", **os.environ}
    if config is not None:
        environment["TF_CONFIG"] = config
    if task.kind == "worker":
        environment |= {"RANK": str(task.index), "LOCAL_RANK": str(task.index), "WORLD_SIZE": str(nproc)}
        argv = emulator.command(task.index, argv, with_parent=threading.current_thread() is threading.main_thread())
    process = task.process = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        bufsize=1,
        start_new_session=True,  # Ctrl-C is for us; we end them
        env=environment,
    )
    streams = ((process.stdout, sys.stdout, "stdout"), (process.stderr, sys.stderr, "stderr"))
    task.readers = tuple(
        threading.Thread(target=_copy, args=(source, target, task, task.stderr.with_suffix(f".{name}")), daemon=True)
        for source, target, name in streams
    )
    for reader in task.readers:
        reader.start()


def _copy(source: TextIO, target: TextIO, task: _Task, path: Path) -> None:
    """A process's lines, to its log file and with its name to the terminal."""
    with source, path.open("w") as log:
        for line in source:
            log.write(line)
            log.flush()
            if any(words in line for words in NOISE):
                continue
            target.write(f"[{task.name}] {line}")


def _wait(tasks: Sequence[_Task]) -> bool:
    """Until the work is done (False) or has failed, and the others have had time to say so."""
    chief = next((task for task in tasks if task.kind == "chief"), None)
    decisive = [task for task in tasks if task.kind != "worker"] if chief else list(tasks)
    lost: set[str] = set()
    while True:
        if any(task.exitcode for task in decisive):
            break
        for task in tasks:
            if chief and task.kind == "worker" and task.exitcode and task.name not in lost:
                lost.add(task.name)
                print(f"omnilearn: {task.name} ended (status {task.exitcode}); the others go on", file=sys.__stderr__)
        if all(task.exitcode == 0 for task in ([chief] if chief else tasks)):
            _drain(tasks if chief is None else [chief])
            return False
        time.sleep(POLL)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and chief is None and any(task.exitcode is None for task in tasks):
        time.sleep(POLL)
    _drain([task for task in tasks if task.exitcode is not None])
    return True


def _drain(tasks: Sequence[_Task]) -> None:
    for task in tasks:
        for reader in task.readers:
            reader.join(FORCE)


def _end(tasks: Sequence[_Task]) -> None:
    running = [task.process for task in tasks if task.process is not None and task.process.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + FORCE
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        running = [process for process in running if process.poll() is None]
    _drain(tasks)
