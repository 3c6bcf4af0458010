"""Where several hosts meet: which of them is the meeting place, and by which address and interface this one is reached.

torchrun asks the hostname, which on many machines is 127.0.0.1; here the route to the meeting place is asked instead.
No packet is sent.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any


def split(endpoint: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT"; torchrun's default port where there is none."""
    host, _, port = endpoint.strip().rpartition(":")
    if not host or not port.isdigit():
        return endpoint.strip().rstrip(":"), 29400
    return host.strip("[]"), int(port)


def is_host(endpoint: str) -> bool | None:
    """Whether this machine is ``endpoint`` and its port is free (None: the name cannot be resolved)."""
    host, port = split(endpoint)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror:
        return None
    except OSError as error:
        return False if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE) else None
    return True


def claim(endpoint: str) -> Any:
    """Of several launchers on this machine that could host the meeting, one: it gets something to keep as long as it
    lives. None for the others."""
    _, port = split(endpoint)
    name = f"omnilearn-rendezvous-{port}"
    if sys.platform.startswith("linux"):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0{name}")  # a name without a file: gone with the process
            return lock
        except OSError:
            lock.close()
            return None
    import fcntl

    file = Path(tempfile.gettempdir(), f"{name}-{os.getuid()}").open("w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except OSError:
        file.close()
        return None


def reachable_address() -> str | None:
    """An address of this machine that is not its loopback one, or None. No packet is sent."""
    for there in ("192.0.2.1", "2001:db8::1"):  # nobody's: they are for documentation
        address = local_address(f"[{there}]:9")
        if address is not None:
            return address
    return None


def local_address(endpoint: str) -> str | None:
    """The address of ours that the hosts meeting at ``endpoint`` can reach, or None."""
    host, port = split(endpoint)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface(address: str) -> str | None:
    """The network interface that has ``address`` (IPv4, Linux), or None."""
    if not sys.platform.startswith("linux") or ":" in address:
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, 0x8915, name.encode().ljust(40, b"\0"))  # SIOCGIFADDR
            except OSError:  # this one has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
