"""What happened to the workers, as figures: batches, time spent, a few steps; asynchronous: updates and staleness.

Each takes a run and a width in pixels and gives SVG, or "" where there is nothing to show. Few workers have a colour
each; many are shown as rows.
"""

from __future__ import annotations

from html import escape

import numpy as np

from omnilearn.observe import words
from omnilearn.observe.report.chart import Chart, number
from omnilearn.observe.report.history import NAN, Floats, Phase, Rows, Run
from omnilearn.observe.report.lanes import FEW, Lanes, colour, keys, representative, workers_legend
from omnilearn.observe.words import duration

SHOWN_STEPS, MOST_LANES = 4, 16
"""Steps and workers of the timeline."""


# Batches


def batches(run: Run, width: int, upto: float | None = None) -> str:
    """Every worker's batch, with a mark wherever the plan changed, somebody was parked, or something broke."""
    phases = run.phases
    if not phases or not any(phase.batches for phase in phases):
        return ""
    begin = run.began if run.is_async else 0.0
    end = upto or max(run.seconds if run.is_async else run.steps, phases[-1].first - begin + 1)
    few = len(run.workers) <= FEW
    x_label = "time" if run.is_async else "step"
    text = duration if run.is_async else number
    lanes = Lanes(run, width)
    most = max(max(phase.batches, default=0) for phase in phases) or 1
    if few:
        chart = Chart(width, 300, (0, end), (0, most * 1.05), top=24, x_label=x_label, x_text=text)
        chart.text(4, 12, "batch", kind="label")
    else:
        chart = Chart(width, lanes.height + 64, (0, end), left=lanes.left, top=24, x_label=x_label, x_text=text)
        lanes.label(chart)
    for k in range(len(run.workers)):
        sizes = [phase.batches[k] if k < len(phase.batches) else 0 for phase in phases]
        starts = [phase.first - begin for phase in phases]
        if few:
            points = [*zip(starts, sizes, strict=True), (end, sizes[-1])]
            chart.line(
                [p for p in points if p[0] <= end], colour(k), steps=True, shift=1.5 * (k - len(run.workers) // 2)
            )
            continue
        for start, stop, size in zip(starts, [*starts[1:], end], sizes, strict=True):
            if start < end:
                title = f"worker {k}: {size or 'parked'} from {x_label} {text(start)}"
                strength = 0.15 + 0.85 * size / most if size else 1.0
                kind = "heat" if size else "parked"
                chart.bar((start, min(stop, end)), lanes.top(chart, k), lanes.each, kind, title, strength)
    for phase, kind, title in _changes(run):
        if phase.first - begin <= end:
            chart.mark(phase.first - begin, kind, title)
    for event in run.marks:
        place = event["t"] - begin if run.is_async else event.get("step")
        if isinstance(place, (int, float)) and place <= end and event["kind"] in ("oom", "fault"):
            chart.mark(place, "bad", words.mark(event))
    scale = keys(("heat faint", "small batch"), ("heat", f"batch {most}"), ("parked", "parked"))
    return chart.svg("Batch per worker") + (workers_legend(run, range(len(run.workers))) if few else scale)


def beginning(run: Run, width: int) -> str:
    """The same, of the first steps alone, where plans changed only there."""
    phases = run.phases
    if len(phases) < 2 or run.is_async or phases[-1].first > 0.15 * run.steps or run.steps < 100:
        return ""
    return batches(run, width, upto=max(1.25 * phases[-1].first, 20))


def _changes(run: Run) -> list[tuple[Phase, str, str]]:
    marks = []
    for old, new in zip(run.phases, run.phases[1:], strict=False):
        parked = [k for k, (a, b) in enumerate(zip(old.batches, new.batches, strict=False)) if a and not b]
        back = [k for k, (a, b) in enumerate(zip(old.batches, new.batches, strict=False)) if b and not a]
        at = "" if run.is_async else f"step {number(new.first)}: "
        told = [words.reason(new.plan)]
        told += [f"{words.workers(parked)} parked"] if parked else []
        told += [f"{words.workers(back)} back"] if back else []
        marks.append((new, "parking" if parked or back else "plan", at + "; ".join(told)))
    return marks


# Where time went

KINDS = {"compute": "computing", "data": "waiting for samples", "wait": "waiting for others", "parked": "parked"}


def time_spent(run: Run, width: int) -> str:
    """Of each worker's time: computing, waiting for samples, waiting for the others, parked."""
    spent = [run.spent(k) for k in range(len(run.workers))]
    if not any(sum(s.values()) for s in spent):
        return ""
    lanes = Lanes(run, width)
    chart = Chart(width, lanes.height + 46, (0, 100), left=lanes.left, top=4, x_label="% of its time", right=16)
    lanes.label(chart)
    for k, parts in enumerate(spent):
        total, at = sum(parts.values()) or 1.0, 0.0
        for kind, seconds in parts.items():
            share = 100 * seconds / total
            if share > 0:
                title = f"worker {k}: {share:.1f}% {KINDS[kind]} ({duration(seconds)})"
                chart.bar((at, at + share), lanes.top(chart, k), lanes.each, kind, title)
            at += share
    shown = [kind for kind in KINDS if any(parts[kind] for parts in spent)]
    return chart.svg("Computing and waiting per worker") + keys(*((kind, _waiting(run, kind)) for kind in shown))


def _waiting(run: Run, kind: str) -> str:
    return "exchanging with the server" if run.is_async and kind == "wait" else KINDS[kind]


# A few steps, before and after


Panel = tuple[Phase, Floats, Floats, bool]
"""A plan, and times of a few of its steps, workers × steps; whether these are one typical step, repeated."""


def panels(run: Run) -> list[Panel]:
    """Some consecutive steps under the first plan and under the last."""
    pair = run.before_and_after
    phases = list(pair) if pair else [p for p in run.phases[-1:] if run.measured_in(p)]
    if run.is_async:
        return []
    shown = [(phase, *_some_steps(run, phase, last=phase is phases[-1])) for phase in phases]
    shown = [panel for panel in shown if np.isfinite(panel[1]).any(axis=0).all()]
    count = min((busy.shape[1] for _, busy, _, _ in shown), default=0)  # as many in each: then lengths compare
    return [(phase, busy[:, :count], wait[:, :count], typical) for phase, busy, wait, typical in shown]


def longest(run: Run) -> float:
    """Seconds that the longest panel of a run's timeline shows."""
    return max((float(np.nansum(np.nanmax(busy + wait, axis=0))) for _, busy, wait, _ in panels(run)), default=0.0)


def timeline(run: Run, width: int, scale: float) -> str:
    """A few steps before and after balancing, drawn so that ``scale`` seconds fill the width."""
    drawn = []
    shown = panels(run)
    for i, (phase, busy, wait, typical) in enumerate(shown):
        ranks = representative(run, MOST_LANES)
        lanes = Lanes(run, width, ranks=ranks)
        chart = Chart(width, lanes.height + 46, (0, 1e3 * scale), left=lanes.left, top=4, right=16, x_label="ms")
        lanes.label(chart)
        ends = np.cumsum(np.nanmax(busy + wait, axis=0))
        for row, k in enumerate(ranks):
            if k < len(phase.batches) and not phase.batches[k]:
                chart.text(chart.left + 6, lanes.top(chart, row) + lanes.each / 2 + 4, "parked")
            for step, end in enumerate(ends):
                b, w = busy[k, step], wait[k, step]
                start = end - np.nanmax((busy + wait)[:, step])
                if not b > 0:
                    continue
                told = f"worker {k}: {1e3 * b:.1f} ms computing, {1e3 * w:.1f} ms waiting"
                chart.bar((1e3 * start, 1e3 * (start + b)), lanes.top(chart, row), lanes.each, "compute", told)
                chart.bar((1e3 * (start + b), 1e3 * min(start + b + w, end)), lanes.top(chart, row), lanes.each, "wait")
        for end in ends:
            chart.add(f'<path class="axis" d="M{chart.x(1e3 * end)} {chart.top}v{chart.inner_height}"/>')
        when = "Before" if i < len(shown) - 1 else "After" if i else "All along"
        kind = "a typical step, repeated" if typical else "steps as they were measured"
        pace = run.step_time(phase) or 0.0
        title = f"{when}, with the {phase.name}: {number(1e3 * pace)} ms per step on average ({kind})"
        drawn.append(f'<p class="panel">{escape(title)}</p>' + chart.svg(title))
    if not drawn:
        return ""
    return "".join(drawn) + keys(("compute", "computing"), ("wait", "waiting for the others"))


def _some_steps(run: Run, phase: Phase, last: bool) -> tuple[Floats, Floats, bool]:
    """Times of a few steps, workers × steps: consecutive ones where there are, else a typical one repeated."""
    tables = [rows.between(phase) for rows in run.rows.values()]
    single = [_single(rows) for rows in tables]
    active = [k for k, batch in enumerate(phase.batches) if batch and k < len(tables)]
    common = set.intersection(*(set(single[k]) for k in active)) if active else set()
    steps = sorted(common)
    chosen = steps[-SHOWN_STEPS:] if last else steps[:SHOWN_STEPS]
    if chosen and chosen[-1] - chosen[0] < 2 * SHOWN_STEPS:
        table = np.full((2, len(tables), len(chosen)), NAN)
        for k in active:
            table[:, k] = np.array([single[k][step] for step in chosen]).T
        return table[0], table[1], False
    table = np.full((2, len(tables), 3), NAN)
    for k in active:
        rows = tables[k].measured
        if len(rows):
            table[0, k], table[1, k] = np.median(rows["busy_median"]), np.median(rows["wait_median"])
    # Medians of each need not add up to the same step: all end with the last.
    total = np.nanmax(table[0] + table[1], axis=0) if active else table[0, 0]
    table[1] = total - table[0]
    return table[0], table[1], True


def _single(rows: Rows) -> dict[int, tuple[float, float]]:
    mask = (rows["steps"] == 1) & (rows["measured"] > 0)
    part = rows.where(mask)
    return {int(s): (b, w) for s, b, w in zip(part["step"], part["busy"], part["wait"], strict=True)}


# Asynchronous mode


def updates(run: Run, width: int) -> str:
    """How many updates each worker contributed."""
    if not run.is_async:
        return ""
    counts = [run.updates.get(k) or int(run.rows[k]["steps"].sum()) for k in range(len(run.workers))]
    if not any(counts):
        return ""
    lanes = Lanes(run, width)
    chart = Chart(width, lanes.height + 46, (0, max(counts)), left=lanes.left, top=4, right=16, x_label="updates")
    lanes.label(chart)
    for k, count in enumerate(counts):
        chart.bar((0, count), lanes.top(chart, k), lanes.each, "compute", f"worker {k}: {number(count)} updates")
    return chart.svg("Updates per worker")


def staleness(run: Run, width: int) -> str:
    """How many updates of others came between reading the parameters and applying the gradient."""
    tables = [rows.where(np.isfinite(rows["staleness"])) for rows in run.rows.values()]
    tables = [rows for rows in tables if len(rows)]
    if not tables:
        return ""
    values = np.concatenate([np.round(rows["staleness"]) for rows in tables])
    weights = np.concatenate([rows["steps"] for rows in tables])
    most = int(values.max())
    size = max(1, -(-(most + 1) // 40))
    counts = np.bincount((values // size).astype(int), weights)
    share = 100 * counts / counts.sum()
    chart = Chart(width, 240, (0, len(counts) * size), (0, 1.1 * share.max()), top=24, x_label="updates behind")
    chart.text(4, 12, "% of updates", kind="label")
    for i, part in enumerate(share):
        top = chart.y(float(part))
        title = f"staleness {i * size}{f' to {i * size + size - 1}' if size > 1 else ''}: {part:.1f}%"
        gap = 0.08 * size
        span = (i * size + gap, (i + 1) * size - gap)
        chart.bar(span, top, chart.top + chart.inner_height - top, "compute", title)
    return chart.svg("Staleness")
