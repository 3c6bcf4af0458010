"""How it went over time, of one run or several: samples per second, loss, the script's own metrics.

Long runs are shown in bins; for the loss with the smallest and largest value of each beside its mean: nothing is
smoothed away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnilearn.observe.report.chart import Chart, number
from omnilearn.observe.report.history import Rows, Run
from omnilearn.observe.report.lanes import colour, runs_legend
from omnilearn.observe.words import duration

BINS = 240

Trend = list[tuple[float, float, float, float]]
"""Seconds since the start; the smallest, mean and largest value of a bin."""


def series(run: Run, name: str) -> Trend:
    """The step time (name "step") or the loss, in bins."""
    tables = [rows.measured.table for rows in run.rows.values() if len(rows.measured)]
    if not tables:
        return []
    rows = Rows(np.concatenate(tables))
    mean = rows["busy"] + rows["wait"] if name == "step" else rows["loss"]
    low, high = (mean, mean) if name == "step" else (rows["loss_min"], rows["loss_max"])
    known = np.isfinite(mean)
    if not known.any():
        return []
    rows, low, mean, high = Rows(rows.table[known]), low[known], mean[known], high[known]
    # By step, so that the workers' rows of the same steps meet; by time where there are no common steps.
    place = rows["t"] if run.is_async else rows["step"]
    edges = np.linspace(place.min(), place.max() + 1e-9, min(BINS, max(len(np.unique(place)), 1)) + 1)
    bins = np.clip(np.searchsorted(edges, place, side="right") - 1, 0, len(edges) - 2)
    weight = rows["measured"] * (1.0 if name == "step" else np.maximum(rows["batch"], 1))
    order = np.argsort(bins, kind="stable")
    bins, starts = np.unique(bins[order], return_index=True)
    total = np.add.reduceat(weight[order], starts)
    means = np.add.reduceat((weight * mean)[order], starts) / total
    lows, highs = np.minimum.reduceat(low[order], starts), np.maximum.reduceat(high[order], starts)
    times = np.maximum.reduceat(rows["t"][order], starts) - run.began
    return [tuple(map(float, point)) for point in zip(times, lows, means, highs, strict=True)]  # type: ignore[misc]


def rates(run: Run) -> list[tuple[float, float]]:
    """Seconds since the start, samples per second."""
    if not run.is_async:
        batch = run.global_batch
        return [(t, batch / mean) for t, _, mean, _ in series(run, "step") if mean > 0]
    tables = [rows.measured for rows in run.rows.values() if len(rows.measured)]
    if not tables:
        return []
    bins = int(np.clip(min(map(len, tables)) // 2, 1, 100))
    edges = np.linspace(run.began, max(float(rows["t"].max()) for rows in tables) + 1e-6, bins + 1)
    total = np.zeros(bins)
    for rows in tables:
        place = np.clip(np.searchsorted(edges, rows["t"], side="right") - 1, 0, bins - 1)
        samples = np.bincount(place, rows["measured"] * rows["batch"], bins)
        seconds = np.bincount(place, rows["measured"] * (rows["busy"] + np.nan_to_num(rows["wait"])), bins)
        total += np.divide(samples, seconds, out=np.zeros(bins), where=seconds > 0)
    return [(float(t) - run.began, float(rate)) for t, rate in zip(edges[1:], total, strict=True)]


def throughput(runs: Sequence[Run], width: int) -> str:
    """Samples per second over time, all workers together."""
    lines = [rates(run) for run in runs]
    if not any(len(line) > 1 for line in lines):
        return ""
    end = max(line[-1][0] for line in lines if line)
    high = max(float(np.percentile([rate for _, rate in line], 99)) for line in lines if line)
    chart = Chart(width, 240, (0, end), (0, 1.15 * high), top=24, x_label="time", x_text=duration)
    chart.text(4, 12, "samples/s", kind="label")
    for i, line in enumerate(lines):
        chart.line(line, colour(i))
    return chart.svg("Samples per second") + runs_legend(runs)


def loss(runs: Sequence[Run], width: int) -> str:
    """The loss over time, weighted by batches; the band is from the smallest to the largest of any worker."""
    lines = [series(run, "loss") for run in runs]
    if not any(len(line) > 1 for line in lines):
        return ""
    values = np.array([mean for line in lines for _, _, mean, _ in line])
    low, high = float(values.min()), float(np.percentile(values, 99.5))
    end = max(line[-1][0] for line in lines if line)
    chart = Chart(width, 240, (0, end), (min(0.0, low), 1.1 * high), top=24, x_label="time", x_text=duration)
    chart.text(4, 12, "loss", kind="label")
    for i, line in enumerate(lines):
        chart.band([(t, a, c) for t, a, _, c in line], colour(i))
        chart.line([(t, mean) for t, _, mean, _ in line], colour(i))
    return chart.svg("Loss") + runs_legend(runs)


def metric(runs: Sequence[Run], width: int, name: str) -> str:
    """A metric of the script's own against its seconds of training."""
    lines = [
        [
            (m.get("seconds") or m["t"] - run.began, m[name])
            for m in run.metrics
            if isinstance(m.get(name), (int, float))
        ]
        for run in runs
    ]
    values = [value for line in lines for _, value in line]
    if not values:
        return ""
    end = max(t for line in lines for t, _ in line)
    chart = Chart(
        width, 240, (0, end), (min(0.0, *values), 1.05 * max(values)), top=24, x_label="time", x_text=duration
    )
    chart.text(4, 12, name, kind="label")
    for i, line in enumerate(lines):
        chart.line(line, colour(i))
        for t, value in line:
            chart.dot(t, value, colour(i), 3, f"{runs[i].name}: {number(value)} after {duration(t)}")
    return chart.svg(name) + runs_legend(runs)
