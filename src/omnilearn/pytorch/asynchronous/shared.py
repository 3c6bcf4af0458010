"""Memory that a worker and the server have in common where both run on one host: what lies in it need not be sent.

The worker makes it and says at the server's door how to find it; it has no name in any file system, so that nothing is
left behind whoever dies. Whether both really see the same memory is proven by a secret that the worker wrote into it.
Where there is none (other hosts, other users, other containers), everything is sent, and nobody need know.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from omnilearn.cluster.rendezvous import local_address, split

log = logging.getLogger("omnilearn")

SWITCH = "OMNILEARN_SHARED_MEMORY"
"""Set to 0, everything is sent."""
_NAME = "omnilearn"
_SECRET = 64


@dataclass(frozen=True)
class Offer:
    """Shared memory as its maker has it, until the server has answered."""

    memory: torch.Tensor
    words: dict[str, Any]  # for the server

    def close(self) -> None:
        """The memory itself stays as long as somebody uses it."""
        os.close(self.words["descriptor"])


def offer(address: str, size: int) -> Offer | None:
    """So many bytes to share with the server there; None where it is on another host."""
    if os.environ.get(SWITCH) == "0" or not hasattr(os, "memfd_create") or local_address(address) != split(address)[0]:
        return None
    try:
        descriptor = os.memfd_create(_NAME)
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, size + _SECRET)
        whole, secret = _map(descriptor, size + _SECRET), secrets.token_bytes(_SECRET)
    except OSError:
        os.close(descriptor)
        return None
    whole[size:] = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
    return Offer(whole[:size], {"process": os.getpid(), "descriptor": descriptor, "secret": secret.hex()})


def accept(words: Any, size: int) -> torch.Tensor | None:
    """The memory that a worker offers; None where it cannot be seen from here, or is not what was said."""
    try:
        path = f"/proc/{int(words['process'])}/fd/{int(words['descriptor'])}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != size + _SECRET:
                return None
            whole = _map(descriptor, size + _SECRET)
        finally:
            os.close(descriptor)
        same = secrets.compare_digest(whole[size:].numpy().tobytes(), bytes.fromhex(words["secret"]))
        return whole[:size] if same else None
    except (OSError, KeyError, TypeError, ValueError):
        return None


def pin(memory: torch.Tensor) -> Callable[[], None]:
    """Copies between this memory and a card need not be waited for from now on, and are several times as fast, until
    what is returned is called."""
    runtime, begin = torch.cuda.cudart(), memory.data_ptr()
    if int(runtime.cudaHostRegister(begin, memory.nbytes, 0)):
        log.warning("memory shared with the server cannot be pinned: copies to and from the card take longer")
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # takes the note of that error, which is none of the next kernel's
        return lambda: None

    def unpin() -> None:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(begin)

    return unpin


def _map(descriptor: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
