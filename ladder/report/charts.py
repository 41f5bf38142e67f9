"""Figures as plain data, with colours and units. The page's modules draw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shape = Literal["circle", "star", "cross", "ring", "diamond", "square"]
_SIGNS: dict[Shape, str] = {"circle": "●", "star": "★", "cross": "✕", "ring": "○", "diamond": "◇", "square": "□"}

# Distinguishable with any colour vision (Okabe and Ito), on white and on black.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a000", "#8c6bb1", "#7f7f7f")
FAILED = "#d62728"
ANSWER, RECIPE = "#2da44e", "#d55e00"
GREY = "#8a8a8a"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A mark of a scatter plot, with the range of its `y`."""

    x: float
    y: float
    text: str
    """The tooltip."""
    low: float | None = None
    high: float | None = None
    label: str = ""
    """Words beside the mark, for the few that matter most."""
    tied_to: tuple[float, float] | None = None
    """Another position to which a thin line is drawn: from a proof to its trial."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one colour and shape."""

    name: str
    colour: str
    shape: Shape
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """`y` against `x`, from zero on both axes."""

    x_title: str
    y_title: str
    x_most: float
    series: tuple[Series, ...]
    limit: float | None = None
    """Of `x`."""
    limit_label: str = ""
    line: tuple[tuple[float, float], ...] = ()
    line_label: str = ""

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """Names, colours and signs, in the order of the series."""
        return [(series.name, series.colour, _SIGNS[series.shape]) for series in self.series]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of all stacked bars."""

    name: str
    colour: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A stacked bar: a length for each of the figure's parts, or None."""

    name: str
    """The text beside the bar; empty if its group has only one bar."""
    lengths: tuple[float | None, ...]

    @property
    def total(self) -> float:
        return sum(length or 0.0 for length in self.lengths)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Bars with a common heading."""

    label: str
    bars: tuple[Bar, ...]
    is_answer: bool = False


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Horizontal stacked bars, from zero."""

    title: str
    unit: str
    digits: str
    """The format of a length, such as `,.1f`."""
    parts: tuple[Part, ...]
    groups: tuple[Group, ...]
    limit: float | None = None
    limit_label: str = ""

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """As for a scatter plot."""
        return [(part.name, part.colour, "■") for part in self.parts]


Chart = Scatter | Bars
