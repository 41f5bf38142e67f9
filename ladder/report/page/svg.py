"""Draws charts as inline SVG, without scripts; their colours follow the page's.

Each is drawn at two widths, and the style sheet shows the one that suits the window, so that text keeps its size.
"""

from __future__ import annotations

import math
from html import escape

from ladder.report.charts import Bar, Bars, Chart, Point, Scatter, Series

WIDTHS = {"wide": 1000, "narrow": 360}
_LETTER = 7.8
"""Width in pixels of a letter at 13 pixels (measured with DejaVu Sans, which is a wide font)."""
_LINE = 20
"""Pixels from one line of text to the next. Chosen by eye."""
_BAR, _GAP = 15, 14
"""Pixels of a bar and of the space below it. Chosen by eye."""


def svg(chart: Chart, label: str) -> str:
    """Both drawings of `chart`; `label` describes it for screen readers."""
    drawings = []
    for name, width in WIDTHS.items():
        body, height = _scatter(chart, width) if isinstance(chart, Scatter) else _bars(chart, width)
        drawings.append(
            f'<svg class="chart {name}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
            f"{body}</svg>"
        )
    return "".join(drawings)


def ticks(most: float, number: int) -> list[float]:
    """Round numbers from 0 to `most`, about `number` of them."""
    if most <= 0:
        return [0.0]
    rough = most / number
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [place * step for place in range(int(most / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"


def _text(x: float, y: float, words: str, *, anchor: str = "start", css: str = "") -> str:
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, css: str, extra: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"{extra}/>'


class _Plane:
    """Converts values of a scatter plot to coordinates."""

    def __init__(self, chart: Scatter, width: int) -> None:
        tops = [point.high or point.y for series in chart.series for point in series.points]
        self.y_most = 1.1 * (max(tops, default=0.0) or 1.0)
        self.marks = ticks(self.y_most, 6)
        self.left = 16 + _LETTER * max(len(_number(mark)) for mark in self.marks)
        self.right, self.top, self.bottom = width - 16, 30, 0.45 * width + 180 - 44
        self.height = round(self.bottom + 44)
        self._x_most = chart.x_most

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * min(1.0, value / self._x_most)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * value / self.y_most


def _scatter(chart: Scatter, width: int) -> tuple[str, int]:
    plane = _Plane(chart, width)
    parts = [_text(plane.left, 16, chart.y_title, css="soft")]
    for mark in plane.marks:
        parts.append(_line(plane.left, plane.y(mark), plane.right, plane.y(mark), "grid"))
        parts.append(_text(plane.left - 6, plane.y(mark) + 4, _number(mark), anchor="end"))
    for mark in ticks(chart.x_most, 10 if width > 500 else 5):
        parts.append(_line(plane.x(mark), plane.top, plane.x(mark), plane.bottom, "grid"))
        parts.append(_text(plane.x(mark), plane.bottom + 17, _number(mark), anchor="middle"))
    parts.append(_text(plane.right, plane.bottom + 36, chart.x_title, anchor="end", css="soft"))
    if chart.limit is not None:
        at = plane.x(chart.limit)
        parts.append(_line(at, plane.top, at, plane.bottom, "limit"))
        parts.append(_text(at - 5, plane.top + 12, chart.limit_label, anchor="end", css="limit"))
    if len(chart.line) > 1:
        path = " ".join(f"{plane.x(x):.1f},{plane.y(y):.1f}" for x, y in chart.line)
        parts.append(f'<polyline points="{path}" class="proven"><title>{escape(chart.line_label)}</title></polyline>')
    for place, series in enumerate(chart.series):
        parts += [_mark(point, series, place, plane) for point in series.points]
    parts += [_label(point, plane) for series in chart.series for point in series.points if point.label]
    return "".join(parts), plane.height


def _mark(point: Point, series: Series, place: int, plane: _Plane) -> str:
    x, y = plane.x(point.x), plane.y(point.y)
    stroke = f' stroke="{series.colour}"'
    range_bar = ""
    if point.low is not None and point.high is not None:
        low, high = plane.y(point.low), plane.y(point.high)
        range_bar = _line(x, low, x, high, "range", stroke)
        range_bar += "".join(_line(x - 3, end, x + 3, end, "range", stroke) for end in (low, high))
    tie = ""
    if point.tied_to is not None:
        tie = _line(x, y, plane.x(point.tied_to[0]), plane.y(point.tied_to[1]), "range", stroke)
    return (
        f'<g class="mark point" data-part="{place}"><title>{escape(point.text)}</title>{range_bar}{tie}'
        f"{_shape(series, x, y)}</g>"
    )


def _shape(series: Series, x: float, y: float) -> str:
    filled, hollow = f'fill="{series.colour}"', f'fill="none" stroke="{series.colour}" stroke-width="2"'
    if series.shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {filled}/>'
    if series.shape == "ring":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="none" stroke="{series.colour}"/>'
    if series.shape == "square":
        return f'<rect x="{x - 8:.1f}" y="{y - 8:.1f}" width="16" height="16" {hollow}/>'
    if series.shape == "cross":
        arms = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
        return f'<path d="{arms}" {hollow}/>'
    if series.shape == "diamond":
        return f'<path d="M{x:.1f} {y - 8:.1f}l8 8l-8 8l-8 -8z" {hollow}/>'
    corners = []
    for corner in range(10):
        radius, angle = (10.0 if corner % 2 == 0 else 4.2), math.pi * (corner / 5 - 0.5)
        corners.append(f"{x + radius * math.cos(angle):.1f},{y + radius * math.sin(angle):.1f}")
    return f'<polygon points="{" ".join(corners)}" {filled}/>'


def _label(point: Point, plane: _Plane) -> str:
    """The label beside its mark, on the side with enough room."""
    x, y = plane.x(point.x), plane.y(point.y)
    length = _LETTER * len(point.label)
    if x + 14 + length <= plane.right:
        return _text(x + 14, y + 16, point.label, css="label")
    if x - 14 - length >= plane.left:
        return _text(x - 14, y + 16, point.label, anchor="end", css="label")
    at = min(max(x, plane.left + length / 2), plane.right - length / 2)
    return _text(at, y + 24, point.label, anchor="middle", css="label")


def _bars(chart: Bars, width: int) -> tuple[str, int]:
    bars = [bar for group in chart.groups for bar in group.bars]
    names = max((len(bar.name) for bar in bars), default=0)
    totals = max(len(_total(bar, chart)) for bar in bars)
    left, right = (names * _LETTER + 8 if names else 1), width - totals * _LETTER - 10
    most = max([*(bar.total for bar in bars), chart.limit or 0.0]) or 1.0
    scale = (right - left) / most
    y = _LINE if chart.limit is not None else 0.0
    rows: list[str] = []
    for group in chart.groups:
        lines = _wrapped(group.label, int(width / _LETTER))
        for number, words in enumerate(lines):
            rows.append(_text(0, y + 14 + number * _LINE, words, css="label" if group.is_answer else ""))
        y += len(lines) * _LINE
        for bar in group.bars:
            rows.append(_bar(bar, chart, left, y, scale))
            y += _BAR + 3
        y += _GAP
    behind = []
    for mark in ticks(most, 8 if width > 500 else 4):
        behind.append(_line(left + mark * scale, _LINE, left + mark * scale, y, "grid"))
        rows.append(_text(left + mark * scale, y + 15, _number(mark), anchor="middle" if mark else "start"))
    if chart.limit is not None:
        at = left + chart.limit * scale
        behind.append(_line(at, _LINE, at, y, "limit"))
        rows.append(_text(at - 5, 14, chart.limit_label, anchor="end", css="limit"))
    rows.append(_text(right, y + 34, chart.title, anchor="end", css="soft"))
    return "".join([*behind, *rows]), round(y + 42)


def _bar(bar: Bar, chart: Bars, left: float, y: float, scale: float) -> str:
    drawn = [_text(left - 6, y + 12, bar.name, anchor="end", css="soft")] if bar.name else []
    x = left
    for place, (part, length) in enumerate(zip(chart.parts, bar.lengths, strict=True)):
        if not length:
            continue
        text = f"{part.name}: {length:{chart.digits}} {chart.unit}"
        drawn.append(
            f'<g class="mark point" data-part="{place}"><title>{escape(text)}</title>'
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.5, length * scale):.1f}" height="{_BAR}" '
            f'fill="{part.colour}"/></g>'
        )
        x += length * scale
    drawn.append(_text(x + 5, y + 12, _total(bar, chart), css="total"))
    return "".join(drawn)


def _total(bar: Bar, chart: Bars) -> str:
    return f"{bar.total:{chart.digits}} {chart.unit}"


def _wrapped(words: str, letters: int) -> list[str]:
    """Lines of at most `letters` characters, broken at spaces, or within words that are too long."""
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > letters:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
        while len(lines[-1]) > letters:
            lines[-1:] = [lines[-1][:letters], lines[-1][letters:]]
    return lines
