"""Starts the server process and lets workers join it.

The server is forked from rank 0, so that it has the user's own optimizer and schedulers, whatever they are; it leaves
everything else of that process behind and outlives it. Workers come to a small door of its own: one line of JSON with
who they are, checked against the server's model and options before any gloo group is made. Whoever says something
else there is let go.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from omnilearn.cluster.rendezvous import local_address
from omnilearn.cluster.resources import Resources
from omnilearn.errors import OmniLearnError, PeerFailure, UsageError
from omnilearn.pytorch.asynchronous import shared, wire
from omnilearn.pytorch.asynchronous.members import Member
from omnilearn.pytorch.asynchronous.room import START
from omnilearn.pytorch.asynchronous.server import Server
from omnilearn.pytorch.asynchronous.wire import Header, Pair

log = logging.getLogger("omnilearn")
Folder = str | os.PathLike[str] | None

JOINING = timedelta(seconds=30)
LONGEST_LINE = 16 * 2**20
AT_THE_DOOR = 64
LINGER = 5.0
"""Seconds that the server waits for somebody to join when all workers are gone and one of them died."""
MOST_THREADS = 8
"""Of the server; with more the memory of one machine is no faster."""
LEAVE_GROUPS = "OMNILEARN_SERVER_GROUPS"
"""Control groups for the server where rank 0 plays a slow machine (set by the emulator, ``os.pathsep`` between)."""


# The server's side


def threads(device: str, cores: float) -> int:
    """What the server computes with beside such a worker. On a CPU the workers have all cores; where they compute on
    cards, the others are free for it, and it is what a large model's steps wait for."""
    return 1 if device == "cpu" else max(1, min(int(cores) // 4, MOST_THREADS))


def start(
    host: str, build: Callable[[], Server], passport: dict[str, Any], folder: str | os.PathLike[str] | None
) -> str:
    """Fork the server; its address. ``build`` makes it, in the new process."""
    door = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128)
    address = f"{host}:{door.getsockname()[1]}"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the parent: none of them is used again
        pid = os.fork()
    if not pid:
        code = 1
        try:
            if os.fork():  # nobody's child: it outlives rank 0, and leaves no zombie
                os._exit(0)
            _leave_home(door.fileno())
            _main(door, address, build(), passport, folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code)
    os.waitpid(pid, 0)
    door.close()
    log.info("the asynchronous server is at %s", address)
    return address


def _leave_home(keep: int) -> None:
    """Let go of what belongs to rank 0: its terminal, its connections, its threads' settings, its limits."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.excepthook = sys.__excepthook__
    # OpenMP's threads did not come along: with one thread none is looked for (as in DataLoader workers). The threads
    # that serve workers begin with none, and make their own.
    torch.set_num_threads(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    with contextlib.suppress(OSError):
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if descriptor > 2 and descriptor != keep and not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.dup2(nothing, descriptor)  # not closed: whoever still holds the number must not close ours
    for group in filter(None, os.environ.get(LEAVE_GROUPS, "").split(os.pathsep)):
        with contextlib.suppress(OSError):
            Path(group).write_text(str(os.getpid()))
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _main(
    door: socket.socket, address: str, server: Server, passport: dict[str, Any], folder: str | os.PathLike[str] | None
) -> None:
    host = address.rpartition(":")[0]
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    if folder:
        with contextlib.suppress(OSError):
            Path(folder, "server.json").write_text(json.dumps({"address": address, "pid": os.getpid()}) + "\n")
    keeper = _Door(door, host, store.port, server, passport)
    threading.Thread(target=keeper.open, name="door", daemon=True).start()
    began, empty = time.monotonic(), 0.0
    beat = min(0.25, server.settings.lease_timeout / 4)
    while True:
        if server.left.wait(beat):
            server.left.clear()
        with server.lock:
            everybody = server.joined >= server.settings.expected or time.monotonic() - began > START
            if server.members or not everybody:
                empty = time.monotonic()
            elif not server.unclean or time.monotonic() - empty > LINGER:
                break
        server.check_silence()
    server.finish()


@dataclass
class _Door:
    listener: socket.socket
    host: str
    store: int
    server: Server
    passport: dict[str, Any]

    def __post_init__(self) -> None:
        self._room = threading.Semaphore(AT_THE_DOOR)
        self._lock = threading.Lock()
        self._next = self.server.settings.expected
        self._visits = 0

    def open(self) -> None:
        while True:
            visitor, where = self.listener.accept()
            if not self._room.acquire(blocking=False):
                visitor.close()
                continue
            threading.Thread(target=self._meet, args=(visitor, where[0]), daemon=True).start()

    def _meet(self, visitor: socket.socket, where: str) -> None:
        try:
            with visitor:
                visitor.settimeout(JOINING.total_seconds())
                try:
                    joining = self._let_in(visitor, where)
                except OmniLearnError as error:
                    log.warning("a worker from %s was not let in: %s", where, error)
                    with self.server.lock:
                        self.server.refused += 1
                        self.server.lock.notify_all()
                    _say(visitor, {"error": str(error)})
                    return
            member = self._connect(joining, where) if joining else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError, wire.Disconnected, wire.Nonsense) as error:
            log.warning("somebody from %s came to the server's door and was let go: %s", where, str(error)[:200])
            return
        finally:
            self._room.release()
        if member is not None:
            self.server.serve(member)

    def _let_in(self, visitor: socket.socket, where: str) -> dict[str, Any] | None:
        """Check who comes, tell it where to go on."""
        hello = _listen(visitor)
        if hello.get("omnilearn") != wire.PROTOCOL:
            raise ValueError(f"it does not speak protocol {wire.PROTOCOL}")
        if hello["want"] == "rank":
            _say(visitor, {"rank": self._new_rank()})
            return None
        check(self.passport, hello["passport"])
        names = {f.name for f in fields(Resources)}
        found = Resources(**{key: value for key, value in hello["resources"].items() if key in names})
        rank = int(hello["rank"])
        with self.server.lock:
            if rank in self.server.members:
                raise UsageError(f"rank {rank} is here already: join without RANK in the environment, or wait a little")
        with self._lock:
            self._visits += 1
            name = f"visit-{self._visits}"
        memory = shared.accept(hello.get("memory"), self.server.owner.portrait.shared)
        _say(visitor, {"store": self.store, "name": name, "shared": memory is not None})
        return {"name": name, "rank": rank, "resources": found, "memory": memory}

    def _new_rank(self) -> int:
        with self._lock, self.server.lock:
            self._next = max([self._next, *(rank + 1 for rank in self.server.members)])
            self._next += 1
            return self._next - 1

    def _connect(self, joining: dict[str, Any], where: str) -> Member | None:
        store = dist.TCPStore(self.host, self.store, is_master=False, timeout=JOINING)
        pair = Pair(store, joining["name"], 0, self.host, JOINING)
        pair.limit(self.server.settings.timeout)
        layout = self.server.owner.portrait
        member = Member.of(joining["rank"], where, joining["resources"], pair, layout, joining["memory"])
        header, parts = self.server.welcome(member)
        try:
            pair.send(header, parts)
        except OmniLearnError:
            self.server.leave(member)
            raise
        return member if header["kind"] == wire.OK else None


def check(mine: dict[str, Any], theirs: Any) -> None:
    """Raise where a worker's model, options or packages differ from the server's."""
    for what, values in mine.items():
        others = theirs[what]
        for name in dict.fromkeys([*values, *others]):
            if values.get(name) != others.get(name):
                raise UsageError(
                    f"{what} differ: {name} is {values.get(name, 'missing')} at the server and "
                    f"{others.get(name, 'missing')} at this worker: start all workers with the same script, options "
                    f"and packages"
                )


def _say(peer: socket.socket, message: dict[str, Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def _listen(peer: socket.socket) -> dict[str, Any]:
    line, deadline = bytearray(), time.monotonic() + JOINING.total_seconds()
    while not line.endswith(b"\n"):
        more = peer.recv(65536)
        line += more
        if not more or len(line) > LONGEST_LINE or time.monotonic() > deadline:
            raise ValueError("no line of JSON")
        if len(line) == len(more) and not line.startswith(b"{"):
            raise ValueError("no line of JSON")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("no JSON object")
    return message


# The workers' side


def ask(address: str, message: dict[str, Any]) -> dict[str, Any]:
    """The server's answer at its door."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            f"{address!r} is no address of a server: give HOST:PORT, as server.json in its log folder has it"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=JOINING.total_seconds()) as peer:
            _say(peer, {"omnilearn": wire.PROTOCOL, **message})
            answer = _listen(peer)
    except (OSError, ValueError) as error:
        raise PeerFailure(f"no asynchronous server answers at {address}: {error}") from error
    if "error" in answer:
        raise UsageError(f"the server at {address} did not let this worker in: {answer['error']}")
    return answer


def join(
    address: str, rank: int, passport: dict[str, Any], resources: dict[str, Any], timeout: timedelta, size: int
) -> tuple[Pair, Header, torch.Tensor | None]:
    """A connection to the server at ``address``, its first words, and ``size`` bytes shared with it, if they can be."""
    offer = shared.offer(address, size)
    try:
        told = ask(address, {"want": "join", "rank": rank, "passport": passport, "resources": resources,
                             "memory": offer and offer.words})  # fmt: skip
    finally:
        if offer is not None:
            offer.close()
    host = address.rpartition(":")[0].strip("[]")
    try:
        store = dist.TCPStore(host, int(told["store"]), is_master=False, timeout=JOINING)
        pair = Pair(store, told["name"], 1, local_address(address) or host, JOINING)
        header = pair.receive_header((wire.OK, wire.FAILED))
        pair.limit(timeout)
    except (RuntimeError, wire.Disconnected) as error:
        raise PeerFailure(f"the connection to the server at {address} failed: {error}") from error
    return pair, header, offer.memory if offer is not None and told["shared"] else None
