"""What was measured behind the plans, as figures: fitted curves with their points, the spread of compute times."""

from __future__ import annotations

import numpy as np

from omnilearn.observe.report.chart import Chart, number
from omnilearn.observe.report.history import Floats, Rows, Run
from omnilearn.observe.report.lanes import FEW, Lanes, colour, keys, representative, workers_legend

POINTS = 150
"""Dots per worker in a figure."""


def curves(run: Run, width: int) -> str:
    """The fitted line of each worker, and the measured steps behind it."""
    shown = representative(run, FEW)
    dots = {k: _points(run.rows[k]) for k in shown}
    if not any(len(points) for points in dots.values()):
        return ""
    reach_x = max(float(points[:, 0].max()) for points in dots.values() if len(points))
    times = np.concatenate([points[:, 1] for points in dots.values()])
    lines = {k: line for k in range(len(run.workers)) if (line := run.line(k)) is not None}
    tops = [a + b * float(dots[k][:, 0].max()) for k, (a, b) in lines.items() if k in dots and len(dots[k])]
    high = max([float(np.percentile(times, 98)) * 1.15, *tops])
    chart = Chart(width, 320, (0, reach_x * 1.05), (0, 1e3 * high), top=24, x_label="batch")
    chart.text(4, 12, "compute ms", kind="label")
    for k, (a, b) in lines.items():
        if k not in shown:
            chart.line([(0, 1e3 * a), *_until(a, b, reach_x, high)], "grey")
    for i, k in enumerate(shown):
        for batch, seconds in dots[k]:
            if seconds <= high:
                chart.dot(batch, 1e3 * seconds, colour(i), title=f"worker {k}: batch {batch:g}, {1e3 * seconds:.1f} ms")
        if k in lines:
            a, b = lines[k]
            chart.line([(0, 1e3 * a), *_until(a, b, reach_x, high)], colour(i))
    return chart.svg("Compute time by batch") + workers_legend(run, shown)


def _until(a: float, b: float, x: float, high: float) -> list[tuple[float, float]]:
    """Where a line ends: at the right, or at the top."""
    end = x * 1.05 if a + b * x * 1.05 <= high else max((high - a) / b, 0.0)
    return [(end, 1e3 * (a + b * end))]


def _points(rows: Rows) -> Floats:
    part = rows.measured
    table = np.stack([part["batch"], part["busy_median"]], axis=1)
    if len(table) <= POINTS:
        return table
    # Rare batches tell most about a line: at most so many of each, spread over the run.
    sizes, place = np.unique(table[:, 0], return_inverse=True)
    each = max(3, POINTS // len(sizes))
    kept = [np.flatnonzero(place == i) for i in range(len(sizes))]
    return np.asarray(
        table[np.concatenate([k[np.linspace(0, len(k) - 1, min(each, len(k))).astype(int)] for k in kept])]
    )


def distribution(run: Run, width: int) -> str:
    """How compute times spread: smallest, quartiles and largest, per worker, before balancing and after."""
    pair = run.before_and_after
    phases = list(pair) if pair else [None]
    lanes = Lanes(run, width, parts=2)
    table = [
        [(rows if phase is None else run.under(k, phase)).quantiles("busy") for phase in phases]
        for k, rows in run.rows.items()
    ]
    known = [q for row in table for q in row if np.isfinite(q).all()]
    if not known:
        return ""
    # A single step can take ten times as long (the first, a disk): the boxes decide the scale.
    high = 1.03 * min(max(q[4] for q in known), 2.5 * max(q[3] for q in known))
    chart = Chart(
        width,
        lanes.height + 46,
        (0, 1e3 * high),
        left=lanes.left,
        top=4,
        right=16,
        x_label="compute ms per step",
    )
    lanes.label(chart)
    half = lanes.each / 2
    for k, row in enumerate(table):
        for i, q in enumerate(row):
            if not np.isfinite(q).all():
                continue
            kind = "after" if len(row) == 1 or i else "before"
            top = lanes.top(chart, k) + (i * half if len(row) == 2 else half / 2)
            low, lower, middle, upper, most = (1e3 * v for v in q)
            told = f"worker {k}: {number(low)} – {number(middle)} (median) – {number(most)} ms"
            chart.bar((low, most), top + half / 2 - 0.75, 1.5, kind, told, 0.6)
            chart.bar((lower, upper), top + 1, half - 2, kind, told, 0.7)
            chart.bar((middle, middle), top, half, kind + " median", told)
    names = (pair[0].name, pair[1].name) if pair else ("all steps",)
    kinds = ("before", "after") if pair else ("after",)
    return chart.svg("Distribution of compute times") + keys(*zip(kinds, names, strict=True))
