"""The report as one HTML page: words, figures, tables. No script, nothing from the network; every text is escaped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from html import escape
from importlib import resources
from typing import Any

from omnilearn import __version__
from omnilearn.observe import words
from omnilearn.observe.report import figures, spread, summary, trends
from omnilearn.observe.report.chart import number
from omnilearn.observe.report.history import Run
from omnilearn.observe.report.lanes import label
from omnilearn.observe.words import duration

WIDE, HALF, NARROW = 1000, 488, 350
"""Widths that figures are drawn at: alone, side by side, on a phone."""
MOST_ROWS = 200

PER_RUN: tuple[tuple[str, str, Callable[..., str]], ...] = (
    (
        "Batch per worker",
        "Triangles mark new plans, black ones that somebody was parked or came back, red ones trouble. Point at a mark "
        "to read why.",
        figures.batches,
    ),
    ("Batch per worker in the beginning", "The same, in the first steps.", figures.beginning),
    (
        "Where time went",
        "Of each worker's time in the training loop. Waiting includes the reduction itself.",
        figures.time_spent,
    ),
    (
        "A few steps",
        "Steps one after the other, before and after balancing, on one scale of time. A step ends for all together, at "
        "the vertical lines. Of many workers some are shown.",
        figures.timeline,
    ),
    ("Updates per worker", "How many gradients of each worker were applied.", figures.updates),
    (
        "Staleness",
        "How many updates came between a worker's reading of the parameters and its own update.",
        figures.staleness,
    ),
    (
        "Compute time by batch",
        "Dots are measured steps (of long runs a selection, and medians of windows), lines what the controller fitted "
        "last. Of many workers some have colours, from the fastest to the slowest; the others are grey.",
        spread.curves,
    ),
    (
        "Distribution of compute times",
        "Box: the middle half; stroke: median; thin line: from the smallest to the largest. Of windows of many steps "
        "their quartiles count.",
        spread.distribution,
    ),
)


def page(runs: Sequence[Run], problems: Sequence[str] = ()) -> str:
    """The report of one run, or of several side by side."""
    one = len(runs) == 1
    title = f"OmniLearn: {runs[0].name}" if one else f"OmniLearn: {len(runs)} runs"
    parts = [f"<h1>{escape(title)}</h1>", _when(runs)]
    parts += [f'<p class="problem">{escape(text)}</p>' for text in [*problems, *(p for r in runs for p in r.problems)]]
    parts.append(_one_summary(runs[0]) if one else _summaries(runs))
    if not one:
        parts.append(_compared(runs))
    scale = max(figures.longest(run) for run in runs)
    for heading, caption, draw in PER_RUN:
        parts.append(_section(heading, caption, runs, partial(draw, scale=scale) if draw is figures.timeline else draw))
    for heading, caption, trend in (
        ("Samples per second", "All workers together, while training.", trends.throughput),
        ("Loss", "As given to backward, weighted by batches; the band spans the workers' steps.", trends.loss),
    ):
        parts.append(_together(heading, caption, runs, trend))
    names = dict.fromkeys(name for run in runs for m in run.metrics for name in m if name not in _NOT_METRICS)
    for name in names:
        parts.append(_together(name.capitalize(), "Reported by the script.", runs, _metric(name)))
    for run in runs:
        parts.append(_details(run, one))
    return document(title, parts)


_NOT_METRICS = ("v", "kind", "t", "rank", "step", "epoch", "seconds", "reached")


def _metric(name: str) -> Callable[[Sequence[Run], int], str]:
    return lambda runs, width: trends.metric(runs, width, name)


def document(title: str, parts: Sequence[str]) -> str:
    style = resources.files("omnilearn.observe.report").joinpath("style.css").read_text(encoding="utf-8")
    # Nothing may be loaded or run, whatever a run's texts contain.
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<link rel="icon" href="data:,">\n<style>\n{style}</style>\n</head>\n<body>\n'
        + "\n".join(part for part in parts if part)
        + f'\n<footer class="soft">Made by omnilearn {escape(__version__)}, {made}.</footer>\n</body>\n</html>\n'
    )


def _when(runs: Sequence[Run]) -> str:
    began = min((run.began for run in runs if run.began), default=0.0)
    text = datetime.fromtimestamp(began).astimezone().strftime("%Y-%m-%d %H:%M") if began else ""
    return f'<p class="soft">Started {text}</p>' if text else ""


def _one_summary(run: Run) -> str:
    said = "".join(f"<p>{escape(text)}</p>" for text in summary.sentences(run))
    return f'<section class="summary">{said}</section>{_tiles(run)}'


def _tiles(run: Run, others: Sequence[Run] = ()) -> str:
    tiles = summary.figures(run, others)
    shown = "".join(f'<div class="tile"><b>{escape(v)}</b><span>{escape(what)}</span></div>' for v, what in tiles)
    return f'<div class="tiles">{shown}</div>' if tiles else ""


def _summaries(runs: Sequence[Run]) -> str:
    parts = [f"<p>{escape(text)}</p>" for text in summary.comparison(runs)]
    for run in runs:
        said = " ".join(summary.sentences(run, [other for other in runs if other is not run]))
        parts.append(f"<p><b>{escape(run.name)}</b>: {escape(said)}</p>")
    return f'<section class="summary">{"".join(parts)}</section>'


def _compared(runs: Sequence[Run]) -> str:
    def cell(value: Any) -> str:
        return "–" if value is None or value == "" else number(value) if isinstance(value, (int, float)) else str(value)

    def spent(run: Run, kind: str) -> str | None:
        found = summary.shares(run)
        return None if found is None else f"{found[kind]:.0%}"

    rows: list[tuple[str, list[Any]]] = [
        ("mode", [run.mode for run in runs]),
        ("workers", [len(run.workers) for run in runs]),
        ("samples per step", [None if run.is_async else run.global_batch for run in runs]),
        ("steps", [run.steps for run in runs]),
        ("samples per second", [run.rate() for run in runs]),
        ("ms per step", [1e3 * t if (t := run.step_time()) else None for run in runs]),
        ("computing", [spent(run, "compute") for run in runs]),
        ("waiting for others", [spent(run, "wait") for run in runs]),
        ("plans", [len(run.phases) for run in runs]),
        ("batches at the end", [_batches(run) for run in runs]),
        ("duration", [duration(run.seconds) for run in runs]),
    ]
    return table("Side by side", ["", *(run.name for run in runs)], [[name, *map(cell, row)] for name, row in rows])


def _batches(run: Run) -> str | None:
    if not run.phases:
        return None
    last = run.phases[-1].batches
    return " ".join(str(b) if b else "–" for b in last) if len(last) <= 12 else f"{min(last)} to {max(last)}"


def _section(heading: str, caption: str, runs: Sequence[Run], draw: Callable[[Run, int], str]) -> str:
    wide = WIDE if len(runs) == 1 else HALF
    drawn = []
    for run in runs:
        figure = draw(run, wide)
        if figure:
            name = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
            drawn.append(f"<figure>{name}{both(figure, draw(run, NARROW))}</figure>")
    if not drawn:
        return ""
    note = f'<p class="soft">{escape(caption)}</p>'
    body = f'<div class="side">{"".join(drawn)}</div>' if len(runs) > 1 else "".join(drawn)
    return f"<section><h2>{escape(heading)}</h2>{note}{body}</section>"


def _together(heading: str, caption: str, runs: Sequence[Run], draw: Callable[[Sequence[Run], int], str]) -> str:
    figure = draw(runs, WIDE)
    if not figure:
        return ""
    note = f'<p class="soft">{escape(caption)}</p>'
    return f"<section><h2>{escape(heading)}</h2>{note}<figure>{both(figure, draw(runs, NARROW))}</figure></section>"


def both(wide: str, narrow: str) -> str:
    """A figure for wide and one for narrow screens; the style shows one of them."""
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def _details(run: Run, one: bool) -> str:
    name = "" if one else f" of {run.name}"
    plans = [
        [number(plan.get("step") or 0), words.reason(plan), _sizes(plan["batches"]), _expected(plan)]
        for plan in run.plans[-MOST_ROWS:]
    ]
    workers = [[label(run, k), host, _batch_time(run, k), _memory(run, k)] for k, host in enumerate(_hosts(run))]
    happened = [[duration(event["t"] - run.began), words.mark(event)] for event in run.marks[-MOST_ROWS:]]
    happened += [["end", error] for error in run.errors]
    tables = [
        table("Plans", ["from step", "why", "batches", "expected"], plans) if plans else "",
        table("Workers", ["worker", "machine", "median compute", "most memory"], workers) if workers else "",
        table("What else happened", ["after", "what"], happened) if happened else "",
    ]
    body = "".join(tables)
    return f"<details><summary>Plans, workers and events{escape(name)}</summary>{body}</details>" if body else ""


def _hosts(run: Run) -> list[str]:
    return [run.hosts[k] if k < len(run.hosts) else "" for k in range(len(run.workers))]


def _sizes(batches: Sequence[int]) -> str:
    text = " ".join(str(batch) if batch else "–" for batch in batches)
    return text if len(text) < 120 else text[:117] + "…"


def _expected(plan: dict[str, Any]) -> str:
    predicted = plan.get("predicted")
    return f"{number(1e3 * predicted)} ms per step" if isinstance(predicted, (int, float)) else ""


def _batch_time(run: Run, k: int) -> str:
    middle = float(run.rows[k].quantiles("busy", (0.5,))[0])
    return f"{number(1e3 * middle)} ms" if middle == middle else "–"


def _memory(run: Run, k: int) -> str:
    known = [m for m in run.rows[k]["memory"] if m == m]
    return f"{max(known) / 2**20:,.0f} MiB" if known else "–"


def table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows)
    return (
        f'<h3>{escape(heading)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
