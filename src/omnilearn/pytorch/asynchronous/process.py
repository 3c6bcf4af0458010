"""Starts the server process and lets workers join it.

It is a process of its own, which gets rank 0's optimizer and schedulers, whatever they are, and outlives it. Workers
come to a small door: one line of JSON with the job's token and who they are, checked against the server's model and
options before any gloo group is made. Whoever says something else there is let go.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, fields
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from omnilearn.cluster.rendezvous import local_address
from omnilearn.cluster.resources import Resources
from omnilearn.engine.journal import Journal
from omnilearn.engine.planning import Planning
from omnilearn.engine.progress import Progress
from omnilearn.errors import OmniLearnError, PeerFailure, UsageError
from omnilearn.observe import EventLog
from omnilearn.pytorch.asynchronous import shared, wire
from omnilearn.pytorch.asynchronous.job import Job, read, write
from omnilearn.pytorch.asynchronous.members import Member
from omnilearn.pytorch.asynchronous.owner import Owner
from omnilearn.pytorch.asynchronous.room import START
from omnilearn.pytorch.asynchronous.server import Server
from omnilearn.pytorch.asynchronous.wire import Header, Pair

log = logging.getLogger("omnilearn")

JOINING = timedelta(seconds=60)
"""For a worker to be let in, the server's start included."""
LONGEST_LINE = 16 * 2**20
AT_THE_DOOR = 64
PAUSE = 0.2
"""Seconds before the next visitor is let in where that failed."""
TOKEN = "OMNILEARN_SERVER_TOKEN"
WHERE_TOKENS_ARE = (
    f"set {TOKEN} to the token in server.json, in the log folder of the run, on the server's host; there, workers of "
    f"the same user find it by themselves"
)
LINGER = 5.0
"""Seconds that the server waits for somebody to join when all workers are gone and one of them died."""
MOST_THREADS = 8
"""Of the server; with more the memory of one machine is no faster."""


_lines: list[socket.socket] = []
"""To the process that makes servers, where there is one."""

# The server's side


def threads(device: str, cores: float) -> int:
    """What the server computes with beside such a worker. On a CPU the workers have all cores; where they compute on
    cards, the others are free for it, and it is what a large model's steps wait for."""
    return 1 if device == "cpu" else max(1, min(int(cores) // 4, MOST_THREADS))


def start(host: str, job: Job) -> str:
    """Start the server; its address."""
    door = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128)
    address = f"{host}:{door.getsockname()[1]}"
    file = write(job)
    try:
        _ask_for_a_server([door.fileno(), file])
    finally:
        os.close(file)
        door.close()
    log.info("the asynchronous server is at %s", address)
    return address


def _ask_for_a_server(files: list[int]) -> None:
    """From the process that makes them, which is started with the first one and stays for a while."""
    wanted = {"environment": dict(os.environ), "paths": sys.path, "folder": os.getcwd()}
    text = json.dumps(wanted).encode()
    if _lines:
        with contextlib.suppress(OSError):  # else it has not been needed for long, and is gone
            socket.send_fds(_lines[0], [text], files)
            return
        _lines.pop().close()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with theirs:
        done = subprocess.run(
            [sys.executable, "-I", str(Path(__file__).with_name("serve.py")), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            check=False,
        )
    if done.returncode:
        raise PeerFailure(f"the asynchronous server could not be started: its process ended with {done.returncode}")
    _lines.append(ours)
    socket.send_fds(ours, [text], files)


def serve(door: int, job: int) -> int:
    """The server, from its first word to its last; its exit code. Called by ``serve.py``."""
    torch.set_num_threads(1)  # the threads that serve workers begin so, and make their own
    listener = socket.socket(fileno=door)
    host, port = listener.getsockname()[:2]
    token_file = _token_file(port)
    try:
        warnings.filterwarnings("ignore", module="torch.optim.lr_scheduler")  # its steps are not counted here
        _main(listener, f"{host}:{port}", read(job), token_file)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        token_file.unlink(missing_ok=True)
    return 0


def warm_up() -> None:
    """What an optimizer imports in its first step, which takes about a second: while nobody waits for it."""
    import_module("torch._dynamo")


def _build(job: Job) -> Server:
    owner = Owner(job.likeness, job.optimizer, job.others)
    journal = Journal(EventLog(job.log_dir, 0), "pytorch", job.options)
    server = Server(owner, Planning(job.policy, job.shares.problem), job.settings, journal)
    server.on_progress = Progress().write
    return server


def _main(door: socket.socket, address: str, job: Job, token_file: Path) -> None:
    server, host = _build(job), address.rpartition(":")[0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=128)  # torch's own would listen everywhere
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    _write_secret(token_file, job.token)
    if job.log_dir:
        with contextlib.suppress(OSError):
            facts = {"address": address, "pid": os.getpid(), "token": job.token}
            _write_secret(Path(job.log_dir, "server.json"), json.dumps(facts) + "\n")
    keeper = _Door(door, host, store.port, server, job.passport, job.token)
    threading.Thread(target=keeper.open, name="door", daemon=True).start()
    warm_up()
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


def _token_file(port: int) -> Path:
    """Where workers on the server's host find its token, unless they are told. Its owner alone can read it."""
    return Path(tempfile.gettempdir(), f"omnilearn-server-{os.getuid()}-{port}")


def _write_secret(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    os.replace(unfinished, path)


@dataclass
class _Door:
    listener: socket.socket
    host: str
    store: int
    server: Server
    passport: dict[str, Any]
    token: str

    def __post_init__(self) -> None:
        self._room = threading.Semaphore(AT_THE_DOOR)
        self._lock = threading.Lock()
        self._next = self.server.settings.expected
        # One for all: each would have a thread and connections of its own.
        self._device = dist.ProcessGroupGloo.create_device(hostname=self.host)

    def open(self) -> None:
        while True:
            try:
                visitor, where = self.listener.accept()
            except OSError as error:  # too many open files, a connection that is gone already: the next one may work
                log.warning("nobody could be let in for a moment: %s", error)
                time.sleep(PAUSE)
                continue
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
        if not secrets.compare_digest(str(hello.get("token")).encode(), self.token.encode()):
            raise UsageError(f"its token is not this server's: {WHERE_TOKENS_ARE}")
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
        name = f"visit-{secrets.token_hex(16)}"  # known to nobody else who reaches the store
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
        pair = Pair(store, joining["name"], 0, self._device, JOINING)
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


def token_of(address: str, told: str | None = None) -> str:
    """The token that lets a worker in: told by the job, by the environment, or by a file on the server's host."""
    told = told or os.environ.get(TOKEN)
    if told:
        return told
    port = address.rpartition(":")[2]
    try:
        return _token_file(int(port)).read_text()
    except (OSError, ValueError):
        return ""


def ask(address: str, message: dict[str, Any], token: str) -> dict[str, Any]:
    """The server's answer at its door."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            f"{address!r} is no address of a server: give HOST:PORT, as server.json in its log folder has it"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=JOINING.total_seconds()) as peer:
            _say(peer, {"omnilearn": wire.PROTOCOL, "token": token, **message})
            answer = _listen(peer)
    except (OSError, ValueError) as error:
        raise PeerFailure(f"no asynchronous server answers at {address}: {error}") from error
    if "error" in answer:
        raise UsageError(f"the server at {address} did not let this worker in: {answer['error']}")
    return answer


def join(
    address: str,
    token: str,
    rank: int,
    passport: dict[str, Any],
    resources: dict[str, Any],
    timeout: timedelta,
    size: int,
) -> tuple[Pair, Header, torch.Tensor | None]:
    """A connection to the server at ``address``, its first words, and ``size`` bytes shared with it, if they can be."""
    offer = shared.offer(address, size)
    try:
        told = ask(address, {"want": "join", "rank": rank, "passport": passport, "resources": resources,
                             "memory": offer and offer.words}, token)  # fmt: skip
    finally:
        if offer is not None:
            offer.close()
    host = address.rpartition(":")[0].strip("[]")
    try:
        store = dist.TCPStore(host, int(told["store"]), is_master=False, timeout=JOINING)
        device = dist.ProcessGroupGloo.create_device(hostname=local_address(address) or host)
        pair = Pair(store, told["name"], 1, device, JOINING)
        header = pair.receive_header((wire.OK, wire.FAILED))
        pair.limit(timeout)
    except (RuntimeError, wire.Disconnected) as error:
        raise PeerFailure(f"the connection to the server at {address} failed: {error}") from error
    return pair, header, offer.memory if offer is not None and told["shared"] else None
