"""Several launchers on their way to each other: what is said while one waits, and that it can be ended.

torch waits in C++, where no Python handler runs: a signal would be heard when the wait is over, perhaps never.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from omnilearn.cluster import rendezvous

FIRST_WORD = 2.0
"""Seconds of waiting after which it is said for whom."""
AGAIN = 60.0
"""Seconds between two such lines."""
HEARD = 0.5
"""Seconds that Python has to act on a signal by itself."""


def why(endpoint: str, hosts_here: bool | None) -> str:
    """What may be wrong, as far as this host can see."""
    host, port = rendezvous.split(endpoint)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return f"the name {host!r} does not resolve here: is it right?"
    if hosts_here:
        return "start the same command there; they must reach this host at that name and port"
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError as error:
        return f"nothing answers there yet ({error.strerror or error}): is the command running on it?"
    return "start the same command there, with the same --nnodes and --rdzv-id"


class Meeting:
    """``of``: the least number of hosts. ``give_up`` cleans up where the process must be ended from aside."""

    def __init__(
        self, endpoint: str, of: int, hosts_here: bool | None, say: Callable[[str], None], give_up: Callable[[], None]
    ) -> None:
        self._endpoint, self._of, self._hosts_here = endpoint, of, hosts_here
        self._say, self._give_up = say, give_up
        self._over = threading.Event()

    def over(self) -> None:
        """All are here, or Python acts on a signal by itself."""
        self._over.set()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits. In the main thread."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threads = [
            threading.Thread(target=self._speak, name="omnilearn-meeting", daemon=True),
            threading.Thread(target=self._listen, args=(reading,), name="omnilearn-signals", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            signal.set_wakeup_fd(before)
            for thread in threads:
                thread.join(5)
            os.close(writing)
            os.close(reading)

    def _speak(self) -> None:
        pause = FIRST_WORD
        while not self._over.wait(pause):
            missing = "1" if self._of == 2 else f"up to {self._of - 1}"
            reason = why(self._endpoint, self._hosts_here)
            if not self._over.is_set():
                self._say(f"waiting for {missing} of {self._of} hosts at {self._endpoint}: {reason}")
            pause = AGAIN

    def _listen(self, reading: int) -> None:
        while not self._over.is_set():
            if not select.select([reading], [], [], 0.1)[0]:
                continue
            numbers = [number for number in os.read(reading, 64) if number in _ENDING]
            if numbers and not self._over.wait(HEARD):
                name = signal.Signals(numbers[0]).name
                word = "interrupted" if numbers[0] == signal.SIGINT else f"ended by {name}"
                print(f"omnilearn: {word} while it waited for other hosts", file=sys.__stderr__, flush=True)
                with contextlib.suppress(Exception):
                    self._give_up()
                os._exit(128 + numbers[0])


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
