"""The door a worker goes through: takes its place (control group, namespace, cores), then becomes its
command.

Run by path, with the standard library only: ``python -I worker.py PLAN RANK [--with-parent PID] --
COMMAND``. It replaces itself (exec), so that signals and tracebacks are the command's own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000


def _libc(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def main(arguments: list[str]) -> NoReturn:
    split = arguments.index("--")
    (plan, rank, *options), command = arguments[:split], arguments[split + 1 :]
    if options and sys.platform.startswith("linux"):
        # A launcher killed hard must not leave workers behind; it may be dead before we get to say so.
        _libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(options[1]):
            sys.exit(1)
    with open(plan) as file:
        place = json.load(file)["workers"][int(rank)]
    for door in place["groups"]:
        with open(door, "w") as file:
            file.write(str(os.getpid()))
    if place["namespace"]:
        fd = os.open(place["namespace"], os.O_RDONLY | os.O_CLOEXEC)
        _libc("setns", fd, CLONE_NEWNET)
    if place["cores"]:
        os.sched_setaffinity(0, place["cores"])
    os.environ.update(place["environment"])
    with open(place["pids"], "a") as file:
        file.write(f"{os.getpid()}\n")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"omnilearn: {command[0]!r} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
