"""What the figures of a report have in common: colours, names, one row per worker."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from omnilearn.observe.report.chart import COLOURS, Chart
from omnilearn.observe.report.history import Run

FEW = COLOURS
"""Workers that can be told apart by colour."""


def colour(k: int) -> str:
    return f"c{k % COLOURS}"


def label(run: Run, k: int) -> str:
    """A worker's name: "worker 3 · 1.2 cores"."""
    worker = run.workers[k]
    place = "" if worker.cores is None and worker.device == "cpu" else f" · {worker.place}"
    return f"worker {k}{place}"


class Lanes:
    """One row per worker in a chart whose height follows their number."""

    def __init__(self, run: Run, width: int, *, parts: int = 1, ranks: Sequence[int] | None = None) -> None:
        ranks = range(len(run.workers)) if ranks is None else ranks
        self.count = len(ranks)
        self.gap = 7.0 if self.count <= 16 else 3.0
        self.each = (16.0 if self.count <= 16 else 9.0) if parts == 1 else (8.0 if self.count <= 16 else 5.0) * parts
        names = [label(run, k) for k in ranks]
        short = width <= 500 or max(map(len, names), default=0) > 33
        self.names = [str(k) for k in ranks] if short else names
        self.left = 14 + int(6.3 * max(map(len, self.names), default=1))
        self.height = int(self.count * (self.each + self.gap))

    def top(self, chart: Chart, k: int) -> float:
        """Where the k-th row begins."""
        return chart.top + k * (self.each + self.gap) + self.gap / 2

    def label(self, chart: Chart) -> None:
        """Name the rows."""
        for k, name in enumerate(self.names):
            if self.count <= 24 or k % 2 == 0:
                chart.text(chart.left - 8, self.top(chart, k) + self.each / 2 + 4, name, "end")


def keys(*pairs: tuple[str, str]) -> str:
    """A legend: the class and the name of each kind."""
    items = "".join(f'<span class="key {kind}">{escape(name)}</span>' for kind, name in pairs)
    return f'<p class="legend">{items}</p>'


def representative(run: Run, most: int) -> list[int]:
    """All workers, or of many the fastest, the slowest and some between."""
    count = len(run.workers)
    if count <= most:
        return list(range(count))

    def per_sample(k: int) -> float:
        samples = run.rows[k].total("batch")
        return run.rows[k].total("busy") / samples if samples else float("inf")

    order = sorted(range(count), key=per_sample)
    return [order[round(i * (count - 1) / (most - 1))] for i in range(most)]


def workers_legend(run: Run, ranks: Sequence[int]) -> str:
    return keys(*((colour(i), label(run, k)) for i, k in enumerate(ranks)))


def runs_legend(runs: Sequence[Run]) -> str:
    return keys(*((colour(i), run.name) for i, run in enumerate(runs))) if len(runs) > 1 else ""
