"""Makes this machine play the cluster an ``Emulation`` describes, changes it on schedule, and cleans up.

    with Emulator(parse("HL8", None, cores())) as emulator:
        workers = [Popen(emulator.command(k, [sys.executable, "train.py"])) for k in range(4)]

Chooses the best mechanism the machine allows; the mechanisms themselves are in the modules beside this
one. What it makes carries its process's name (``owner.py``) and is gone after ``close``; what a killed
process left behind is removed at the next start.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from omnilearn.cluster import cgroup, mps, netns, units, worker
from omnilearn.cluster.emulation import Change, Emulation, Worker, check
from omnilearn.cluster.owner import PREFIX, folder_name, is_stale, is_stale_folder, new_name
from omnilearn.cluster.resources import cores, has_card, ram
from omnilearn.cluster.throttle import Throttle
from omnilearn.errors import InfeasibleError, OmniLearnError, UsageError

By = Literal["auto", "cgroup", "affinity", "throttle"]
POLL = 0.005  # seconds between looks at the progress file


def remove_stale() -> None:
    """Remove what dead launchers left: control groups, namespaces, bridges, MPS daemons, folders."""
    for group in cgroup.all_groups(PREFIX):
        if is_stale(group.name):
            cgroup.remove_if_empty(group)
    netns.remove_stale()
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if is_stale_folder(folder.name):
            mps.quit_daemon(folder / "mps")
            shutil.rmtree(folder, ignore_errors=True)


class Emulator:
    """One emulated cluster. ``say`` receives one line about what was chosen and one for each change."""

    def __init__(
        self, emulation: Emulation, *, by: By = "auto", say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.emulation, self.mechanism = emulation, "none"
        self.host_address = "127.0.0.1"
        self._by, self._say = by, say
        self._now = list(emulation.workers)
        self._groups: list[cgroup.Group] = []
        self._killed_before = [0] * emulation.nproc  # for want of memory, before the workers were last started
        self._server_group: cgroup.Group | None = None
        self._network: netns.Network | None = None
        self._mps: mps.Mps | None = None
        self._throttle: Throttle | None = None
        self._affinity: list[list[int]] = []
        self._folder: Path | None = None
        self._pid = 0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._undo = contextlib.ExitStack()  # runs all it holds, last first, even if one of them fails

    def __enter__(self) -> Emulator:
        self.prepare()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- before the workers start

    def prepare(self) -> None:
        """Make everything, or raise with nothing left behind."""
        remove_stale()
        name = new_name()
        self._pid = os.getpid()
        self._folder = Path(tempfile.gettempdir()) / folder_name(name)
        atexit.register(self.close)
        try:
            self._folder.mkdir(mode=0o700)
            self._undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self.progress_file.write_bytes(bytes(8))
            self._limit_cpu_and_memory(name)
            if self.emulation.uses("bandwidth", "latency"):
                if reason := netns.unavailable():
                    raise UsageError(f"{reason}: run as root on Linux, or leave bandwidth and latency out")
                self._undo.callback(netns.remove, name)
                self._network = netns.Network(name, self._now)
                self.host_address = self._network.host_address
            if any(worker.device == "cuda" for worker in self._now) and not has_card():
                raise UsageError(f"emulation {self.emulation.spec!r} has workers on a card, and there is none here")
            if self.emulation.uses("mps"):
                if reason := mps.unavailable():
                    raise UsageError(f"{reason}: emulate CPU shares instead (HL8, cpu=…)")
                self._undo.callback(mps.quit_daemon, self._folder / "mps")
                self._mps = mps.Mps(self._folder)
            self._write_plan()
        except BaseException:
            self.close()
            raise
        watcher = threading.Thread(target=self._watch, name="omnilearn-schedule", daemon=True)
        watcher.start()
        self._undo.callback(watcher.join, 10)
        self._undo.callback(self._end.set)
        if self.emulation.uses("cpu", "memory", "bandwidth", "latency", "mps", "device"):
            self._say(f"emulating {self.emulation} ({self.how})")

    def _limit_cpu_and_memory(self, name: str) -> None:
        wanted = [limit for limit in ("cpu", "memory") if self.emulation.uses(limit)]
        parents = cgroup.parents(wanted)
        if "memory" in wanted and "memory" not in parents:
            raise UsageError(
                "a memory limit needs a control group, and none can be made here: run as root on Linux, or "
                "leave memory out"
            )
        if "cpu" in wanted:
            self.mechanism = self._choose_cpu("cpu" in parents)
            if self.mechanism != "cgroup":
                parents.pop("cpu", None)
        for k, limits in enumerate(self._now):
            if limits.memory is not None and limits.memory > (here := ram()) > 0:
                raise InfeasibleError(
                    f"worker {k} of emulation {self.emulation.spec!r} gets {units.show_size(limits.memory)} of memory, "
                    f"this machine has {units.show_size(here)}: ask for less"
                )
        for k, limits in enumerate(self._now if parents else []):
            self._groups.append(cgroup.Group(f"{name}-{k}", parents))
            self._undo.callback(self._groups[-1].remove)
            self._set(k, limits)
        if self._groups:  # an asynchronous server is started by a worker, but is no part of the machine it plays
            self._server_group = cgroup.Group(f"{name}-server", parents)
            self._undo.callback(self._server_group.remove)
        if self.mechanism == "affinity":
            free = sorted(os.sched_getaffinity(0))
            for limits in self._now:
                count = math.floor(limits.cpu or 0)
                self._affinity.append(free[:count])
                free = free[count:]
        if self.mechanism == "throttle":
            self._throttle = Throttle()
            self._undo.callback(self._throttle.close)

    def _choose_cpu(self, group_possible: bool) -> str:
        changes = any(limits.cpu is not None for c in self.emulation.changes for _, limits in c.values)
        whole = all(limits.cpu is None or limits.cpu >= 1 for limits in self._now)
        pinnable = whole and not changes and hasattr(os, "sched_setaffinity")
        if self._by == "cgroup" and not group_possible:
            raise UsageError(
                "no control group can be made here: run as root, or use --emulate-by throttle (less smooth)"
            )
        if self._by == "affinity" and not pinnable:
            raise UsageError(
                "--emulate-by affinity gives whole cores and keeps them: every worker needs at least 1 core, "
                f"on Linux, without changes; this is {self.emulation}. Use --emulate-by auto"
            )
        if self._by != "auto":
            return self._by
        return "cgroup" if group_possible else "affinity" if pinnable else "throttle"

    def _write_plan(self) -> None:
        plan = [
            {
                "groups": self._groups[k].doors if self._groups else [],
                "namespace": self._network.door(k) if self._network else "",
                "cores": self._affinity[k] if self._affinity else [],
                "environment": self.environment(k),
                "pids": str(self._pids_file(k)),
            }
            for k in range(self.emulation.nproc)
        ]
        self._plan.write_text(json.dumps({"workers": plan}))

    # -- what a worker needs

    def command(self, rank: int, argv: Sequence[str], with_parent: bool = False) -> list[str]:
        """The command that starts ``argv`` as worker ``rank``.

        ``with_parent``: it is killed when the thread that starts it ends (Linux).
        """
        return self.command_for(str(rank), argv, with_parent)

    def command_for(self, rank: str, argv: Sequence[str], with_parent: bool = False) -> list[str]:
        """As ``command``, for a rank filled in later (torchrun's ``${local_rank}``)."""
        door = [sys.executable, "-I", "-S", str(Path(worker.__file__).resolve()), str(self._plan), rank]
        return [*door, *(["--with-parent", str(os.getpid())] if with_parent else []), "--", *argv]

    def environment(self, rank: int) -> dict[str, str]:
        """What worker ``rank`` has in its environment beyond ours; ``command`` sees to it."""
        limits = self.emulation.workers[rank]
        variables = {"OMNILEARN_PROGRESS": str(self.progress_file)}
        if self.emulation.uses("cpu", "memory", "bandwidth", "latency", "mps", "device"):
            variables["OMNILEARN_EMULATE"] = str(self.emulation)
        if self._server_group is not None:
            variables["OMNILEARN_SERVER_GROUPS"] = os.pathsep.join(self._server_group.doors)
        if limits.cpu is not None and "OMP_NUM_THREADS" not in os.environ:
            later = [new.cpu for c in self.emulation.changes for k, new in c.values if k == rank and new.cpu]
            # Whole cores only: threads that share a quota hold each other up at every barrier.
            variables["OMP_NUM_THREADS"] = str(max(1, math.floor(max([limits.cpu, *later]) + 1e-6)))
        if limits.device is not None:
            variables["OMNILEARN_DEVICE"] = limits.device
            if limits.device == "cpu":
                variables["CUDA_VISIBLE_DEVICES"] = ""
        if self._network is not None:
            kinds = ("GLOO", "NCCL", "TP")
            variables |= {f"{kind}_SOCKET_IFNAME": netns.INTERFACE for kind in kinds}
        if self._mps is not None and limits.mps is not None:
            variables |= self._mps.environment(limits.mps)
        return variables

    def address(self, rank: int) -> str:
        """The address of worker ``rank`` as the other workers see it."""
        return self._network.addresses[rank] if self._network else "127.0.0.1"

    def pids(self, rank: int) -> list[int]:
        """The processes started as worker ``rank``, oldest first."""
        return [int(pid) for pid in cgroup.read(self._pids_file(rank)).split()]

    @property
    def progress_file(self) -> Path:
        """Eight bytes, little-endian: the step reached. Any rank writes it (``OMNILEARN_PROGRESS``)."""
        return self._state / "progress"

    @property
    def _plan(self) -> Path:
        return self._state / "plan.json"

    def _pids_file(self, rank: int) -> Path:
        return self._state / f"pids.{rank}"

    @property
    def _state(self) -> Path:
        if self._folder is None:
            raise UsageError("the emulation is not prepared: use `with Emulator(…) as emulator:`")
        return self._folder

    @property
    def how(self) -> str:
        """The mechanisms in use, in words."""
        parts = {
            "cgroup": ["CPU by control groups"],
            "affinity": [f"CPU by pinning to cores {self._affinity}{self._rounded()}"],
            "throttle": ["CPU by stopping and continuing workers, 20 ms period; control groups need root"],
        }.get(self.mechanism, [])
        if self._groups and self.emulation.uses("memory"):
            parts.append("memory by control groups")
        if self._network is not None:
            parts.append("network by namespaces")
            if not self._network.latency:
                parts.append("latency LEFT OUT: this kernel has no netem")
        if self._mps is not None:
            parts.append("card by CUDA MPS")
        return ", ".join(parts)

    @property
    def latency(self) -> bool:
        """Whether latencies that were asked for are in force: they need the kernel's netem."""
        return self._network is not None and self.emulation.uses("latency") and self._network.latency

    def _rounded(self) -> str:
        asked = [limits.cpu or 0.0 for limits in self._now]
        if all(share == len(own) for share, own in zip(asked, self._affinity, strict=False)):
            return ""
        return f", whole ones instead of {', '.join(f'{share:.4g}' for share in asked)}; control groups need root"

    @property
    def limits(self) -> tuple[Worker, ...]:
        """The limits in force now."""
        return tuple(self._now)

    def out_of_memory(self, rank: int) -> bool:
        """Whether the kernel killed a process of worker ``rank`` at its memory limit, since it was last started."""
        return bool(self._groups) and self._groups[rank].out_of_memory > self._killed_before[rank]

    # -- while the workers run

    def change(self, cpu: Sequence[float | None] | None = None, worker: int | None = None, **new: float) -> None:
        """Change limits at once: ``change(cpu=[0.5, 1.2])`` for all, ``change(worker=1, memory=10**9)``."""
        if worker is not None:
            values: list[tuple[int, Worker]] = [(worker, Worker(**new))]  # type: ignore[arg-type]
        elif cpu is not None and len(cpu) == self.emulation.nproc and not new:
            values = [(k, Worker(cpu=share)) for k, share in enumerate(cpu)]
        else:
            raise UsageError(f"change() takes one cpu share for each of {self.emulation.nproc} workers")
        change = Change(tuple(values), at_second=0.0)
        check(Emulation(self.emulation.spec, tuple(self._now), (change,)), cores())
        self._apply(change)

    def _apply(self, change: Change) -> None:
        with self._lock:
            for k, limits in change.values:
                self._now[k] = self._now[k].merged(limits)
                self._set(k, limits)

    def _set(self, k: int, limits: Worker) -> None:
        if limits.cpu is not None and self.mechanism == "cgroup":
            self._groups[k].set_cpu(limits.cpu)
        if limits.cpu is not None and self._throttle is not None:
            for pid in self.pids(k)[-1:]:
                self._throttle.hold(pid, limits.cpu)
        if limits.memory is not None:
            self._groups[k].set_memory(limits.memory)
        if self._network is not None and (limits.bandwidth, limits.latency) != (None, None):
            self._network.set(k, self._now[k])

    def _watch(self) -> None:
        """Applies the schedule; with the throttle, takes hold of each worker as it appears."""
        pending, start = list(self.emulation.changes), 0.0
        held: list[list[int]] = [[]] * self.emulation.nproc  # the last of each worker's processes
        while (pending or self._throttle) and not self._end.wait(POLL):
            if not start or self._throttle:
                last = [self.pids(k)[-1:] for k in range(self.emulation.nproc)]
                for k, pid in enumerate(last):
                    if pid and pid != held[k] and self._throttle:
                        self._set(k, Worker(cpu=self._now[k].cpu))
                held = last
                if not start and all(last):
                    start = time.monotonic()
            step = int.from_bytes(self.progress_file.read_bytes()[:8], "little", signed=True)
            for change in list(pending):
                due = start and time.monotonic() - start >= (change.at_second or 0.0)
                if due if change.at_second is not None else step >= (change.at_step or 0):
                    pending.remove(change)
                    try:
                        self._apply(change)
                    except (OmniLearnError, OSError) as error:
                        self._say(f"the change at {change.when} failed: {error}")
                        continue
                    new = ", ".join(f"worker {k}: {limits}" for k, limits in change.values)
                    self._say(f"emulation at {change.when}: {new}")

    # -- after

    def kill(self) -> None:
        """Kill every worker that leads its own process group, with all in it."""
        for k in range(self.emulation.nproc if self._folder else 0):
            for pid in self.pids(k):
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)

    def start_again(self) -> None:
        """Before the workers are started once more: end what is left of those before them, whose pids others may have
        by the time the new ones end."""
        self.kill()
        self._killed_before = [group.out_of_memory for group in self._groups]
        for k in range(self.emulation.nproc):
            self._pids_file(k).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything, ending what still runs in it. Nothing the second time, or in a forked child."""
        if self._folder is None or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        try:
            self._undo.close()
        finally:
            self._folder = None
