"""Charts as SVG text: axes, lines, bands, bars, dots. Colours are CSS classes, so that a page decides light or dark.

Knows nothing of runs. Every text is escaped. Sizes are in pixels of a chart that is shown unscaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

COLOURS = 8
"""Classes c0 … c7 that a page defines."""

Range = tuple[float, float]


def number(value: float) -> str:
    """A number as people write it.

    >>> number(1234567.0), number(0.04999), number(3.0)
    ('1,234,567', '0.05', '3')
    """
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between two bounds.

    >>> ticks(0, 1, 5)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / max(about, 1)
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


class Chart:
    """One plotting area. ``x`` and ``y`` are the ranges shown; ``y`` None has no vertical axis (rows, bars)."""

    def __init__(
        self,
        width: int,
        height: int,
        x: Range,
        y: Range | None = None,
        *,
        left: int = 54,
        right: int = 12,
        top: int = 12,
        bottom: int = 40,
        x_label: str = "",
        y_label: str = "",
        x_text: Callable[[float], str] = number,
        y_text: Callable[[float], str] = number,
    ) -> None:
        self.width, self.height = width, height
        self.left, self.top = left, top
        self.inner_width, self.inner_height = max(width - left - right, 1), max(height - top - bottom, 1)
        self._x, self._y = _wide(x), _wide(y or (0.0, 1.0))
        self._parts: list[str] = []
        self._axes(y is not None, x_label, y_label, x_text, y_text)

    def x(self, value: float) -> float:
        low, high = self._x
        return round(self.left + self.inner_width * (min(max(value, low), high) - low) / (high - low), 1)

    def y(self, value: float) -> float:
        low, high = self._y
        return round(self.top + self.inner_height * (1 - (min(max(value, low), high) - low) / (high - low)), 1)

    def _axes(
        self,
        vertical: bool,
        x_label: str,
        y_label: str,
        x_text: Callable[[float], str],
        y_text: Callable[[float], str],
    ) -> None:
        bottom, right = self.top + self.inner_height, self.left + self.inner_width
        for value in ticks(*self._x, about=max(3, self.inner_width // 110)):
            at = self.x(value)
            self.add(f'<path class="grid" d="M{at} {self.top}V{bottom}"/>')
            words = x_text(value)
            self.text(at, bottom + 16, words, "end" if at + 3.5 * len(words) > self.width else "middle")
        if vertical:
            for value in ticks(*self._y, about=max(2, self.inner_height // 36)):
                at = self.y(value)
                self.add(f'<path class="grid" d="M{self.left} {at}H{right}"/>')
                self.text(self.left - 6, at + 4, y_text(value), "end")
        if x_label:
            self.text(self.left + self.inner_width / 2, bottom + 34, x_label, "middle", "label")
        if y_label:
            self.text(self.left - 6, self.top - 8, y_label, "end" if self.left > 120 else "start", "label", shift=-44)
        self.add(f'<path class="axis" d="M{self.left} {bottom}H{right}"/>')

    def add(self, part: str) -> None:
        self._parts.append(part)

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", kind: str = "", *, shift: float = 0.0
    ) -> None:
        """Words at a place in pixels."""
        name = f' class="{kind}"' if kind else ""
        self.add(
            f'<text{name} x="{round(x + (shift if anchor == "start" else 0), 1)}" y="{round(y, 1)}" '
            f'text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(
        self, points: Iterable[tuple[float, float]], kind: str, *, steps: bool = False, shift: float = 0.0
    ) -> None:
        """A line through points; with ``steps`` each value holds until the next point. NaN leaves a gap.

        ``shift`` in pixels keeps lines with the same values apart.
        """
        path, down = [], False
        for x, y in points:
            if y != y:
                down = False
                continue
            at_x, at_y = self.x(x), round(self.y(y) + shift, 1)
            path.append(f"H{at_x}V{at_y}" if down and steps else f"{'L' if down else 'M'}{at_x} {at_y}")
            down = True
        if path:
            self.add(f'<path class="line {kind}" d="{"".join(path)}"/>')

    def band(self, points: Sequence[tuple[float, float, float]], kind: str) -> None:
        """The area between a lower and an upper value."""
        known = [p for p in points if p[1] == p[1]]
        if len(known) > 1:
            there = "L".join(f"{self.x(x)} {self.y(high)}" for x, _, high in known)
            back = "L".join(f"{self.x(x)} {self.y(low)}" for x, low, _ in reversed(known))
            self.add(f'<path class="band {kind}" d="M{there}L{back}Z"/>')

    def bar(self, x: Range, top: float, height: float, kind: str, title: str = "", strength: float = 1.0) -> None:
        """A horizontal bar: a range of values, at pixels from the top of the chart."""
        start, end = self.x(x[0]), self.x(x[1])
        faint = f' fill-opacity="{strength:.2f}"' if strength < 1 else ""
        shape = f'<rect class="{kind}" x="{start}" y="{round(top, 1)}" width="{round(max(end - start, 0.5), 1)}" '
        shape += f'height="{round(height, 1)}"{faint}'
        self.add(shape + (f"><title>{escape(title)}</title></rect>" if title else "/>"))

    def dot(self, x: float, y: float, kind: str, radius: float = 2.5, title: str = "") -> None:
        shape = f'<circle class="dot {kind}" cx="{self.x(x)}" cy="{self.y(y)}" r="{radius}"'
        self.add(shape + (f"><title>{escape(title)}</title></circle>" if title else "/>"))

    def mark(self, x: float, kind: str, title: str) -> None:
        """A vertical line with a small triangle on top, named when pointed at."""
        at = self.x(x)
        self.add(
            f'<g class="mark {kind}"><title>{escape(title)}</title><path d="M{at} {self.top}V'
            f'{self.top + self.inner_height}"/><path class="head" d="M{at - 4} {self.top - 7}h8l-4 7z"/></g>'
        )

    def svg(self, name: str) -> str:
        return (
            f'<svg role="img" aria-label="{escape(name, quote=True)}" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}">{"".join(self._parts)}</svg>'
        )


def _wide(bounds: Range) -> Range:
    low, high = bounds
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))
