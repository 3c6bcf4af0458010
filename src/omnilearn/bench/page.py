"""A benchmark's record as a page with figures: ``omnilearn bench NAME --report page.html``.

Rows with the same columns are of one kind: their first number is drawn as bars, with its spread where there is one,
and all of it stands in a table below. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from omnilearn.bench.record import Record, Row, cell, cores_in_words
from omnilearn.observe.report.chart import Chart
from omnilearn.observe.report.page import NARROW, WIDE, both, document, table

BAR = 22


def page(record: Record) -> str:
    """The whole page."""
    data = record.as_dict()
    here = data["machine"]
    where = [here["cpu"], cores_in_words(here), *here["gpu"], f"Python {here['python']}"]
    where += [f"torch {here['torch']}"] if here["torch"] else []
    about = f"{record.date[:10]}: {', '.join(where)}, OmniLearn {record.version}"
    parts = [
        f"<h1>omnilearn bench {escape(record.bench)}</h1>",
        f'<p class="soft"><code>{escape(record.command)}</code>, {escape(about)}. '
        f"Machines are noisy: believe ratios within one run.</p>",
    ]
    plain = [(name, value) for name, value in data["summary"].items() if isinstance(value, (int, float, str))]
    if plain:
        parts.append(table("In short", ["", ""], [[_words(name), cell(value)] for name, value in plain]))
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in data["rows"]:
        kinds.setdefault(tuple(row), []).append(row)
    for columns, rows in kinds.items():
        parts.append(f"<section>{_bars(columns, rows)}</section>")
        cells = [[cell(row[column]) for column in columns] for row in rows]
        parts.append(table("All numbers", [_words(column) for column in columns], cells))
    return document(f"omnilearn bench {record.bench}", parts)


def _bars(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """One figure for each group: rows that differ in the last of their names only."""
    value = next((c for c in columns if all(_is_number(row[c]) for row in rows)), None)
    if value is None:
        return ""
    names = [c for c in columns[: columns.index(value)] if any(isinstance(row[c], str) for row in rows)]
    if not names:
        return ""
    groups: dict[str, list[tuple[str, Row]]] = {}
    for row in rows:
        *outer, last = (str(row[name]) for name in names)
        groups.setdefault(" · ".join(outer), []).append((last, row))
    drawn = []
    for group, bars in groups.items():
        figures = [_figure(bars, value, columns, group, width) for width in (WIDE, NARROW)]
        drawn.append(f"<h3>{escape(group)}</h3><figure>{both(*figures)}</figure>")
    return f"<h2>{escape(_words(value))}</h2>{''.join(drawn)}"


def _figure(bars: Sequence[tuple[str, Row]], value: str, columns: Sequence[str], group: str, width: int) -> str:
    low, high = (next((c for c in (f"{value}_{end}", end) if c in columns), None) for end in ("lower", "upper"))
    reach = max(max(float(row[value]), float(row[high] or 0) if high else 0.0) for _, row in bars)
    left = min(14 + int(6.6 * max(len(name) for name, _ in bars)), width // 2)
    chart = Chart(width, BAR * len(bars) + 46, (0, 1.03 * reach), left=left, top=4, right=16, x_label=_words(value))
    for k, (name, row) in enumerate(bars):
        top = chart.top + k * BAR + 4
        chart.text(chart.left - 8, top + BAR / 2, name if len(name) * 6.6 < left else name[: left // 7] + "…", "end")
        chart.bar((0, float(row[value])), top, BAR - 8, "compute", f"{name}: {cell(row[value])}")
        if low and high and _is_number(row[low]) and _is_number(row[high]):
            spread = f"{name}: quartiles {cell(row[low])} to {cell(row[high])}"
            chart.bar((float(row[low]), float(row[high])), top + BAR / 2 - 5, 2, "ink", spread)
    return chart.svg(f"{group}: {_words(value)}" if group else _words(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _words(name: str) -> str:
    return name.replace("_", " ")
