"""How far a benchmark is, on stderr: a live bar in a terminal (with rich), else a line per finished piece."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """``with Progress("sync", 120) as progress: progress.done("HL8 heavy: oracle")``; ``total`` may grow."""

    def __init__(self, bench: str, total: int) -> None:
        self._bench, self.total, self._count, self._begin = bench, total, 0, time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            try:
                from rich import progress
                from rich.console import Console
            except ImportError:
                return self
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                console=Console(stderr=True, highlight=False),
            )
            self._bar.start()
            self._task = self._bar.add_task(f"bench {self._bench}", total=self.total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def now(self, text: str) -> None:
        """What is being done; only a live bar shows it."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"bench {self._bench}: {text}", total=self.total)

    def done(self, text: str) -> None:
        """A piece is finished."""
        self._count += 1
        if self._bar is not None:
            self._bar.update(
                self._task, description=f"bench {self._bench}: {text}", completed=self._count, total=self.total
            )
            return
        spent = time.monotonic() - self._begin
        print(
            f"bench {self._bench}: [{self._count}/{self.total}, {spent:.0f} s] {text}",
            file=sys.stderr,
            flush=True,
        )
