"""Server processes begin here, run by path: ``python -I serve.py SOCKET``, a connection to rank 0's process.

A process of its own from its first line on, and not a fork of rank 0, which has threads: what they had locked would
stay locked for ever. It forks while it has one thread, once so that it is nobody's child (it outlives rank 0 and leaves
no zombie) and then for every server that rank 0 asks for: the next one need not wait for torch.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

LEAVE_GROUPS = "OMNILEARN_SERVER_GROUPS"
"""Control groups for the server where rank 0 plays a slow machine (set by the emulator, ``os.pathsep`` between)."""
NO_CARDS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
"""The server computes on the CPU, and takes no memory of a card; NumPy would start threads."""
LONGEST = 2**20
"""Bytes of a request: an environment and a list of folders."""
LINGER = 20.0
"""Seconds that this process stays for the next request."""


def leave_home() -> None:
    """Leave what belongs to rank 0: its terminal, its signals, its limits."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for group in filter(None, os.environ.get(LEAVE_GROUPS, "").split(os.pathsep)):
        with contextlib.suppress(OSError):
            Path(group).write_text(str(os.getpid()))
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))


def main(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # servers that end leave no zombies
    text, files, _, _ = socket.recv_fds(connection, LONGEST, 2)
    while text:
        wanted = json.loads(text)
        os.environ.clear()
        os.environ.update(wanted["environment"])
        os.environ.update(NO_CARDS)
        sys.path[:] = wanted["paths"]
        from omnilearn.pytorch.asynchronous.process import serve, warm_up  # with one thread: see the command

        if os.fork():
            for file in files:
                os.close(file)
            warm_up()  # for the next one
        else:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.chdir(wanted["folder"])
            leave_home()
            code = serve(*files)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)  # threads that wait in C++ would abort it
        if not select.select([connection], [], [], LINGER)[0]:
            return
        text, files, _, _ = socket.recv_fds(connection, LONGEST, 2)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.setsid()
    main(socket.socket(fileno=int(sys.argv[1])))
