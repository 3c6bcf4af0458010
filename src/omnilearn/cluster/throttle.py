"""A CPU share without rights: stop and continue a process of our own so that it uses no more than its share.

The last resort where neither control groups nor affinity can be had. Keeps an account per worker: it
earns its share of wall time, pays the CPU time it used, and is stopped while in debt. Where the system
tells no CPU time of another process (macOS), running time is charged as if all its threads were busy.
Children of a worker (data loaders) are stopped with it only if it leads a process group, and their CPU
time is not charged.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

PERIOD = 0.020  # seconds; what is saved while idle: at most one period's share
TICK = 0.002


class _Account:
    def __init__(self, pid: int, cores: float) -> None:
        self.pid, self.cores, self.balance, self.stopped = pid, cores, 0.0, False
        self.used, self.seen = _cpu_time(pid), time.monotonic()
        with contextlib.suppress(OSError):
            self.target = -pid if os.getpgid(pid) == pid else pid

    def settle(self) -> bool:
        """Charge what was used, stop or continue; False when the process has ended."""
        try:
            self._settle()
        except OSError:
            return False
        return True

    def _settle(self) -> None:
        now = time.monotonic()
        elapsed, self.seen = now - self.seen, now
        used = _cpu_time(self.pid)
        if used is None or self.used is None:
            spent = 0.0 if self.stopped else elapsed * max(1.0, -(-self.cores // 1))
        else:
            spent, self.used = used - self.used, used
        self.balance = min(self.cores * PERIOD, self.balance + self.cores * elapsed - spent)
        if (self.balance < 0) != self.stopped:
            self.signal(signal.SIGCONT if self.stopped else signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        self.stopped = number == signal.SIGSTOP
        target = self.target
        if target < 0:
            os.killpg(-target, number)
        else:
            os.kill(target, number)


def _cpu_time(pid: int) -> float | None:
    """CPU seconds of another process, all its threads; None where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return None
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) computes


class Throttle:
    """Holds processes to their shares from a thread of this process."""

    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="omnilearn-throttle", daemon=True)
        self._thread.start()

    def hold(self, pid: int, cores: float) -> None:
        """Hold ``pid`` to ``cores`` from now on (again with another value to change it)."""
        with self._lock:
            if pid in self._accounts:
                self._accounts[pid].cores = cores
                return
            with contextlib.suppress(OSError):
                self._accounts[pid] = _Account(pid, cores)

    def _loop(self) -> None:
        while not self._end.wait(TICK):
            with self._lock:
                self._accounts = {pid: each for pid, each in self._accounts.items() if each.settle()}

    def close(self) -> None:
        """Stop throttling and let everybody run. Does nothing the second time."""
        self._end.set()
        self._thread.join(5)
        with self._lock:
            for account in self._accounts.values():
                with contextlib.suppress(OSError):
                    account.signal(signal.SIGCONT)
            self._accounts.clear()
