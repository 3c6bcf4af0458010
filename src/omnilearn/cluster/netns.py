"""A small network of our own: one namespace per worker, joined by a bridge, each link as slow as asked.

Needs root and ``ip``/``tc`` (iproute2) on Linux. Bandwidth is limited in both directions by a token
bucket (tbf); latency is added to every packet a worker sends by netem, where the kernel has it. Workers
see each other and this machine's bridge address, nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from omnilearn.cluster.emulation import Worker
from omnilearn.cluster.owner import is_stale, is_stale_link, short
from omnilearn.errors import UsageError

INTERFACE = "eth0"  # inside each namespace
NETWORK = "198.18"  # RFC 2544: addresses set aside for benchmarks, routed nowhere
FOLDER = Path("/run/netns")


def unavailable() -> str:
    """Why namespaces cannot be made here; "" if they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network limits need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"network limits need the command {missing[0]!r} (package iproute2)" if missing else ""


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if check and done.returncode:
        raise UsageError(f"{' '.join(command)!r} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout if done.returncode == 0 else ""


class Network:
    """The bridge and the namespaces ``NAME-0``, ``NAME-1``, …; ``latency``: whether the kernel can delay."""

    def __init__(self, name: str, workers: Sequence[Worker]) -> None:
        self._short, self._names = short(name), [f"{name}-{k}" for k in range(len(workers))]
        self._limited: set[tuple[int, str]] = set()
        self.latency = True
        if len(workers) > 200:
            raise UsageError(f"{len(workers)} workers with network limits: at most 200 fit on one bridge")
        subnet = _free_subnet()
        self.host_address = f"{subnet}.1"
        self.addresses = tuple(f"{subnet}.{k + 10}" for k in range(len(workers)))
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.host_address}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for k, worker in enumerate(workers):
            self._add(k)
            self.set(k, worker)

    @property
    def _bridge(self) -> str:
        return f"{self._short}b"

    def _add(self, k: int) -> None:
        space, link = self._names[k], f"{self._short}w{k}"
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", INTERFACE, "netns", space)
        _run("ip", "link", "set", link, "master", self._bridge, "up")
        _run("ip", "-n", space, "addr", "add", f"{self.addresses[k]}/24", "dev", INTERFACE)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "link", "set", INTERFACE, "up")

    def door(self, k: int) -> str:
        """The file a process enters the namespace by (setns)."""
        return str(FOLDER / self._names[k])

    def set(self, k: int, worker: Worker) -> None:
        """Make worker ``k``'s link as slow as ``worker`` says."""
        inside = ("tc", "-n", self._names[k], "qdisc")
        outside = ("tc", "qdisc")
        parent: tuple[str, ...] = ("root",)
        if worker.latency is not None and self.latency:
            delay = ("netem", "delay", f"{worker.latency * 1e6:.0f}us", "limit", "100000")
            known = (k, "delay") in self._limited
            done = _run(*inside, "replace", "dev", INTERFACE, "root", "handle", "1:", *delay, check=known)
            self.latency = bool(done) or "netem" in _run(*inside, "show", "dev", INTERFACE)
            self._limited.add((k, "delay"))
            parent = ("parent", "1:")
        if not self.latency:
            parent = ("root",)
        if worker.bandwidth is not None:
            bucket = _bucket(worker.bandwidth)
            _run(*inside, "replace", "dev", INTERFACE, *parent, "handle", "2:", *bucket)
            _run(*outside, "replace", "dev", f"{self._short}w{k}", "root", "handle", "2:", *bucket)


def remove(name: str) -> None:
    """Remove the network ``name`` or what there is of it."""
    for space in FOLDER.glob(f"{name}-*"):
        _run("ip", "netns", "del", space.name, check=False)
    for link in _links():
        if re.fullmatch(re.escape(short(name)) + r"(b|w\d+)", link):
            _run("ip", "link", "del", link, check=False)


def _bucket(bandwidth: int) -> tuple[str, ...]:
    burst = max(32_000, bandwidth // 8 // 250)  # what passes in 4 ms: the kernel's timer may be that coarse
    return ("tbf", "rate", f"{bandwidth}bit", "burst", str(burst), "latency", "50ms")


def _links() -> list[str]:
    if shutil.which("ip") is None:
        return []
    lines = _run("ip", "-o", "link", "show", check=False).splitlines()
    return [line.split(": ")[1].partition("@")[0] for line in lines]


def _free_subnet() -> str:
    taken = _run("ip", "-o", "-4", "addr", "show")
    for n in range(256):
        subnet = f"{NETWORK}.{(os.getpid() + n) % 256}"
        if f" {subnet}." not in taken:
            return subnet
    raise UsageError(f"all of {NETWORK}.0.0/16 is in use: end some emulations")


def remove_stale() -> None:
    """Remove namespaces and bridges of launchers that are dead."""
    if unavailable():
        return
    if FOLDER.is_dir():
        for space in FOLDER.iterdir():
            if is_stale(space.name):
                _run("ip", "netns", "del", space.name, check=False)
    for link in _links():
        if is_stale_link(link):
            _run("ip", "link", "del", link, check=False)
