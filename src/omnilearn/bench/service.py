"""How a worker of a gang is commanded, whatever it trains with: one request after the other over a socket."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from omnilearn.control import Optimal, Policy, Proportional


def serve(member: Callable[[int, int], Any]) -> None:
    """Answer requests until the socket is closed; arguments of the process: FD RANK SIZE."""
    descriptor, rank, size = map(int, sys.argv[1:])
    pipe, served = Connection(descriptor), member(rank, size)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            break
        name, args = request
        try:
            answer = ("done", getattr(served, name)(*args))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        pipe.send(answer)
    os._exit(0)  # nothing is left to be tidied up, and the framework's threads need not be waited for


def named_policy(text: str) -> str | Policy:
    """A policy by a name that can be sent: ``optimal``, ``optimal from uniform``, ``proportional every 20``."""
    word, _, option = text.partition(" ")
    if option == "from uniform":
        return Optimal(first="uniform") if word == "optimal" else Proportional(first="uniform")
    if option.startswith("every "):
        return Proportional(every=int(option.removeprefix("every ")))
    return text
