"""The workers' output on the terminal: whole lines, each with its rank, and tracebacks kept apart.

torchrun tails the workers' log files and writes each piece with its rank's prefix; this joins pieces to
lines. A traceback is held back for a moment: if the run then fails, the launcher shows the first one by
itself instead of everybody's at once; if it goes on, the lines appear after all. The log files have
everything in any case.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

PREFIX = "[rank ${rank}] "  # torchrun fills in the rank
_PIECE = re.compile(r"\[rank (\d+)\] ")
TRACEBACK = re.compile(r"(\[rank\d+\]: )?Traceback \(most recent call last\)")  # torch adds its own prefix
HOLD = 2.0  # seconds


class Stream:
    """What torchrun writes to in place of stdout or stderr."""

    def __init__(self, target: TextIO, hold: bool) -> None:
        self._target, self._hold = target, hold
        self._lock = threading.Lock()
        self._begun: dict[str, str] = {}  # a line that has no end yet, by rank
        self._held: dict[str, list[str]] = {}
        self._since: dict[str, float] = {}

    def write(self, text: str) -> int:
        match = _PIECE.match(text)
        with self._lock:
            if match is None:
                self._target.write(text)
            else:
                rank = match[1]
                *lines, rest = (self._begun.pop(rank, "") + text[match.end() :]).split("\n")
                if rest:
                    self._begun[rank] = rest
                for line in lines:
                    self._line(rank, line)
            self._target.flush()
        return len(text)

    def _line(self, rank: str, line: str) -> None:
        if self._hold and rank not in self._held and TRACEBACK.match(line):
            self._held[rank], self._since[rank] = [], time.monotonic()
        if rank in self._held:
            self._held[rank].append(line)
        else:
            self._target.write(f"[rank {rank}] {line}\n")

    def flush(self) -> None:
        self._target.flush()

    def isatty(self) -> bool:
        return False

    def release(self, older: float) -> None:
        """Show what was held back for longer than ``older`` seconds."""
        with self._lock:
            for rank in [r for r, since in self._since.items() if time.monotonic() - since >= older]:
                del self._since[rank]
                self._target.writelines(f"[rank {rank}] {line}\n" for line in self._held.pop(rank))
                self._target.flush()

    def end(self) -> None:
        """Show lines that never ended."""
        with self._lock:
            for rank, rest in self._begun.items():
                self._line(rank, rest)
            self._begun.clear()
            self._target.flush()


@contextmanager
def console(out: TextIO, err: TextIO) -> Iterator[None]:
    """Workers' output goes through ``Stream``; what is held when an error leaves the block stays unseen."""
    streams = Stream(out, hold=False), Stream(err, hold=True)
    done = threading.Event()

    def release() -> None:
        while not done.wait(HOLD / 4):
            streams[1].release(HOLD)

    thread = threading.Thread(target=release, name="omnilearn-console", daemon=True)
    thread.start()
    try:
        with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
            yield
        for stream in streams:
            stream.end()
            stream.release(0.0)
    finally:
        done.set()
        thread.join(5)
        for stream in streams:
            stream.end()
