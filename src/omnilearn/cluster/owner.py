"""Names for what an emulation leaves on the machine while it runs, so that a later start can tell what is
stale.

A name holds the pid of its launcher and the time that process started: a pid used again is not mistaken
for it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import socket
from functools import lru_cache
from pathlib import Path

PREFIX = "omnilearn-"
_serial = itertools.count(1)


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (0 where nobody says); None: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def new_name() -> str:
    """A name nothing on this machine has: ``omnilearn-PID-START-SERIAL``."""
    pid = os.getpid()
    return f"{PREFIX}{pid}-{started(pid)}-{next(_serial)}"


@lru_cache
def place() -> str:
    """Which processes the numbers of processes here are of: this boot of this machine, this container."""
    try:
        words = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        words = socket.gethostname()
    return hashlib.blake2b(words.encode(), digest_size=4).hexdigest()


def folder_name(name: str) -> str:
    """The same for a folder where several machines may have theirs: it says of which this is."""
    return f"{name}-{place()}"


def is_stale_folder(name: str) -> bool:
    """Whether it is one of ours, made here, whose launcher is dead."""
    return is_stale(name) and name.endswith(f"-{place()}")


def is_stale(name: str) -> bool:
    """Whether ``name`` is one of ours whose launcher is dead."""
    match = re.match(rf"{PREFIX}(\d+)-(\d+)-\d+", name)
    return match is not None and started(int(match[1])) != int(match[2])


def short(name: str) -> str:
    """The same in the few characters an interface name may have: ``olPID.SERIAL`` (the pid in hex)."""
    pid, _, serial = name.removeprefix(PREFIX).split("-")
    return f"ol{int(pid):x}.{serial}"


def is_stale_link(link: str) -> bool:
    match = re.match(r"ol([0-9a-f]+)\.\d+", link)
    return match is not None and started(int(match[1], 16)) is None
