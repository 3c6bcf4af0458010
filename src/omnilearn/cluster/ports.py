"""Free ports for programs that must be told their port before they start, and take seconds to open it."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from omnilearn.errors import UsageError

LOWEST = 15000
TRIES = 2000


def free_ports(count: int) -> list[int]:
    """So many different ports, free now, that the system hands out to nobody else meanwhile.

    A port of the system's own range (bind to 0) is often given to somebody's outgoing connection before its owner is
    there; so they are drawn from below that range.
    """
    with contextlib.ExitStack() as held:  # all at once, so that none is given twice
        ports: list[int] = []
        for _ in range(TRIES):
            if len(ports) == count:
                return ports
            port = random.SystemRandom().randrange(LOWEST, _first_ephemeral())
            place = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                place.bind(("", port))
                ports.append(port)
    raise UsageError(f"no {count} free ports were found between {LOWEST} and {_first_ephemeral()}")


def _first_ephemeral() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first = 49152  # by IANA; macOS keeps to it
    return first if first > LOWEST + 1000 else 65536
