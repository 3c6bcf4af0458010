"""A running job on the terminal: one line per worker, and how far training is. Plain lines where there is no terminal.

Follows the event files, so it needs nothing of the job but its log folder. rich is imported when a view is made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omnilearn.observe import words
from omnilearn.observe.board import Board, Worker
from omnilearn.observe.events import Follower

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

REFRESH = 0.25  # seconds, on a terminal
PLAIN_EVERY = 5.0  # seconds, elsewhere
AROUND = 8  # lines of a terminal that are not workers
NO_NEWS = 90.0  # seconds without an event after which it is said; three times the longest interval between two
WIDEST_BAR = 40


class LiveView:
    """``with LiveView(folder, "training") as view: while …: view.update()``. ``board`` holds what was seen.

    ``epochs`` and ``target`` (of the metric "accuracy") are shown where the caller knows them.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        title: str,
        *,
        epochs: int | None = None,
        target: float | None = None,
        console: Console | None = None,
        plain_every: float = PLAIN_EVERY,
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self.board, self.title, self.epochs, self.target = Board(), title, epochs, target
        self.starting = "starting the workers"
        self.cores: Sequence[float] | None = None  # where the caller knows better than the workers can see
        self.console = console or Console(highlight=False)
        self._follower = Follower(folder)
        self._since = self._said = time.monotonic()
        self._last_line, self._plain_every = "", plain_every
        self._news = time.monotonic()
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        else:
            self.console.print(f"{self.title}: {self.starting}", soft_wrap=True, markup=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._read()
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
            self._live.stop()
        elif error is None:
            self._say()

    def _read(self) -> None:
        events = self._follower.poll()
        if events:
            self._news = time.monotonic()
        self.board.feed(events)
        for worker, cores in zip(self.board.workers, self.cores or (), strict=False):
            worker.cores = cores

    def update(self, show: bool = True) -> None:
        """Read what is new and show it."""
        self._read()
        if not show:
            return
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
        elif time.monotonic() - self._said >= self._plain_every:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        if not self.board.workers and not self.starting:
            return
        line = self.line()
        if line != self._last_line:
            self.console.print(line, soft_wrap=True, markup=False)  # an error's text may have brackets
        self._last_line = line

    def follow(self, alive: Callable[[], bool]) -> Board:
        """Update until the job is over."""
        while alive():
            self.update()
            time.sleep(REFRESH)
        return self.board

    # What is shown

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        board = self.board
        head = Text(self.title, style="bold")
        if not board.workers:
            if not self.starting:
                return Group()
            seconds = time.monotonic() - self._since
            return Group(head, Text(f"  {self.starting} … {seconds:.0f} s", style="dim"))
        lines: list[Any] = [head, self._table(), Text("  " + " · ".join(self._progress()))]
        if board.error:
            lines.append(Text(f"  failed: {board.error}", style="red"))
        elif board.plan is not None:
            lines.append(Text(f"  plan: {words.reason(board.plan)}", style="dim"))
        return Group(*lines)

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        utf8 = (self.console.encoding or "").lower().startswith("utf")
        full, empty = ("█", "░") if utf8 else ("#", ".")
        room = max(4, self.console.height - AROUND) if self.console.is_terminal else len(self.board.workers)
        workers = _most_telling(self.board.workers, room)
        places = [worker.place[:20] for worker in workers]
        width = max(10, min(WIDEST_BAR, self.console.width - 36 - max(map(len, places))))
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("  worker", justify="right")
        table.add_column("has")
        table.add_column("batch", justify="right")
        legend = f"computing {full} waiting {empty}"
        table.add_column(legend if len(legend) <= width else "compute/wait", width=width, no_wrap=True)
        table.add_column("samples/s", justify="right")
        for worker, place in zip(workers, places, strict=True):
            bar = _bar(worker, width, full, empty)
            if worker.parked:
                table.add_row(str(worker.rank), place, "–", bar, Text("parked", style="yellow"))
            else:
                rate = f"{worker.rate:,.0f}" if worker.rows else ""
                table.add_row(str(worker.rank), place, str(worker.batch), bar, rate)
        hidden = len(self.board.workers) - len(workers)
        if hidden:
            table.add_row("…", Text(f"and {hidden} more", style="dim"), "", "", "")
        return table

    def _progress(self) -> list[str]:
        board = self.board
        value = board.metric.get("accuracy") if board.metric is not None else None
        reached = value is not None and self.target is not None and value >= self.target
        most = f" of at most {self.epochs}" if self.epochs and not reached else ""
        share = min((board.step - board.epoch_step) / board.epoch_steps, 1.0) if board.epoch_steps else None
        done = f" ({share:.0%})" if share is not None and not board.ended else ""
        parts = [f"epoch {board.epoch + 1}{most}{done}", f"step {board.step}"]
        if board.rate:
            parts.append(f"{board.rate:,.0f} samples/s")
        if board.epoch_left is not None:
            more = max((self.epochs or 0) - board.epoch - 1, 0) * board.epoch_steps * (board.step_time or 0.0)
            left = words.duration(round(board.epoch_left + more))
            parts.append(f"at most {left} left" if more else f"{left} left of the epoch")
        if board.loss is not None:
            parts.append(f"loss {board.loss:.4g}")
        if board.gain is not None and board.gain > 1.05:
            parts.append(f"{board.gain:.2g}× as fast as equal batches (predicted)")
        late = [worker.staleness for worker in board.workers if worker.staleness is not None]
        if late:
            parts.append(f"staleness {sum(late) / len(late):.2g}")
        silent = time.monotonic() - self._news
        if silent > NO_NEWS and not board.ended:
            parts.append(f"no news for {words.duration(round(silent))}: is it still running?")
        if value is not None:
            wanted = f" of {self.target:g}" if self.target is not None and not reached else ""
            seconds = board.metric.get("seconds") if board.metric is not None else None
            after = f", reached in {seconds:.1f} s" if reached and seconds is not None else ""
            parts.append(f"accuracy {value:.3f}{wanted}{after}")
        return parts

    def line(self) -> str:
        """All of it in one line."""
        board, seconds = self.board, time.monotonic() - self._since
        if not board.workers:
            return f"{self.title}: {self.starting} … {seconds:.0f} s"
        parts = [*self._progress(), "batches " + " ".join(str(w.batch) if w.batch else "–" for w in board.workers)]
        waits = [f"{1 - w.computing:.0%}" if w.computing is not None and not w.parked else "–" for w in board.workers]
        parts.append("waiting " + " ".join(waits))
        if board.error:
            parts.append(f"failed: {board.error}")
        elif board.plan is not None:
            parts.append(f"plan: {words.reason(board.plan)}")
        return f"{self.title}: " + ", ".join(parts)


def _most_telling(workers: Sequence[Worker], room: int) -> list[Worker]:
    """As many as there is room for, in their order: those who wait least hold up the others."""
    if len(workers) <= room:
        return list(workers)
    order = sorted(workers, key=lambda worker: -2.0 if worker.computing is None else -worker.computing)
    return sorted(order[: room - 1], key=lambda worker: worker.rank)


def _bar(worker: Worker, width: int, full: str, empty: str) -> Any:
    from rich.text import Text

    share = worker.computing
    if worker.parked or share is None:
        return Text("")
    busy = round(share * width)
    return Text.assemble((full * busy, "green"), (empty * (width - busy), "red"))
