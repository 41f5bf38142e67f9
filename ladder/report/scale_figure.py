"""The figures of `ladder scale`: speed and efficiency by the number of GPUs."""

from __future__ import annotations

from collections.abc import Callable

from ladder.report.charts import COLOURS, Point, Scatter, Series, Shape
from ladder.report.scale_points import ScalePoint, ScaleResult
from ladder.units import counted

_LOOKS: dict[str, tuple[str, Shape]] = {
    "measured": (COLOURS[0], "circle"),
    "simulated": (COLOURS[2], "circle"),
    "predicted": (COLOURS[5], "ring"),
}
_BESIDE = 1.06
"""The axis ends at this multiple of the largest number. Chosen: so that its mark is whole."""


def speed_by_gpus(result: ScaleResult) -> Scatter:
    """Tokens/s; the line is what the smallest number would give without any loss."""
    first = next(point for point in result.points if point.tokens_per_second)
    last = result.points[-1].gpus
    each = (first.tokens_per_second or 0.0) / first.gpus
    return _figure(
        result,
        "tokens/s",
        lambda point: 1.0,
        line=tuple((float(gpus), each * gpus) for gpus in (first.gpus, last)),
        line_label=f"As many tokens/s on each GPU as on {counted(first.gpus, 'GPU')}.",
    )


def efficiency_by_gpus(result: ScaleResult) -> Scatter:
    """Tokens/s on each GPU in per cent of those of the smallest number."""

    def times(point: ScalePoint) -> float:
        return 100.0 * (point.efficiency or 0.0) / (point.tokens_per_second or 1.0)

    last = float(result.points[-1].gpus)
    return _figure(result, "%", times, line=((0.0, 100.0), (last, 100.0)), line_label="No loss.")


def _figure(
    result: ScaleResult,
    y_title: str,
    times: Callable[[ScalePoint], float],
    *,
    line: tuple[tuple[float, float], ...],
    line_label: str,
) -> Scatter:
    """Each point's tokens/s and their range, multiplied by `times`."""
    series = []
    for source, (colour, shape) in _LOOKS.items():
        points = tuple(
            _mark(point, point.tokens_per_second, times(point))
            for point in result.points
            if point.source == source and point.tokens_per_second
        )
        if points:
            series.append(Series(name=source, colour=colour, shape=shape, points=points))
    return Scatter(
        x_title="GPUs",
        y_title=y_title,
        x_most=_BESIDE * result.points[-1].gpus,
        series=tuple(series),
        line=line,
        line_label=line_label,
    )


def _mark(point: ScalePoint, speed: float, times: float) -> Point:
    span = f" ({point.low:,.0f} to {point.high:,.0f})" if point.low and point.high else ""
    efficiency = "" if point.efficiency is None else f", {point.efficiency:.0%} efficiency"
    may = "" if point.is_sure else ", may fit"
    return Point(
        x=point.gpus,
        y=speed * times,
        low=point.low and point.low * times,
        high=point.high and point.high * times,
        text=f"{counted(point.gpus, 'GPU')}, {point.candidate}: {point.source}{may}, {speed:,.0f} tokens/s{span}"
        f"{efficiency}",
    )
