"""The best configuration at several numbers of GPUs, and what they say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

_PAYS = 0.5
"""An added GPU pays if it brings at least this share of what each GPU brought before. Chosen: below it, tokens cost
more than twice as much on the added GPUs."""


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """The best configuration at one number of GPUs."""

    gpus: int
    nodes: int
    source: str
    """measured, simulated or predicted; none where nothing fits."""
    candidate: str | None = None
    tokens_per_second: float | None = None
    low: float | None = None
    """Predicted: it is slower than this with a probability of 10 %."""
    high: float | None = None
    device_gib: float | None = None
    joules_per_token: float | None = None
    is_sure: bool = True
    """It was measured, or fits with a probability of 99 %."""
    efficiency: float | None = None
    """Tokens/s per GPU, over those of the smallest number of GPUs that has a speed."""
    cost: float | None = None
    """Of a billion tokens."""


@dataclass(frozen=True, kw_only=True)
class ScaleResult:
    """All points, in ascending order of GPUs, and what they say."""

    model: str
    global_batch_size: int
    price: float | None
    points: tuple[ScalePoint, ...]
    left_out: Mapping[int, str]
    """By number of GPUs: why it is not among the points."""

    @property
    def smallest(self) -> int | None:
        """The fewest of these GPUs on which a configuration surely fits."""
        return next((point.gpus for point in self.points if point.tokens_per_second and point.is_sure), None)

    @property
    def verdict(self) -> str:
        """Where more GPUs stop paying, in one sentence."""
        return _verdict([point for point in self.points if point.tokens_per_second])

    @property
    def fewest_sentence(self) -> str:
        """The fewest GPUs in words."""
        return f"The fewest of these that fit: {self.smallest}." if self.smallest else "None of these surely fits."

    def plain(self) -> dict[str, Any]:
        """The result as values for JSON."""
        return {
            "model": self.model,
            "global_batch_size": self.global_batch_size,
            "price_per_gpu_hour": self.price,
            "smallest_gpus": self.smallest,
            "verdict": self.verdict,
            "left_out": {str(count): reason for count, reason in self.left_out.items()},
            "points": [{each.name: getattr(point, each.name) for each in fields(point)} for point in self.points],
        }


def with_prices(points: Sequence[ScalePoint], price: float | None) -> tuple[ScalePoint, ...]:
    """`points` with their efficiency, and with the cost of a billion tokens if a GPU-hour has a `price`."""
    base = next((p.tokens_per_second / p.gpus for p in points if p.tokens_per_second), None)
    done = []
    for point in points:
        speed = point.tokens_per_second
        if speed and base:
            cost = None if price is None else 1e9 / speed / 3600 * point.gpus * price
            done.append(replace(point, efficiency=speed / point.gpus / base, cost=cost))
        else:
            done.append(point)
    return tuple(done)


def _verdict(points: Sequence[ScalePoint]) -> str:
    speeds = [(point.gpus, point.nodes, point.tokens_per_second or 0.0) for point in points]
    on_one = max((speed for _, nodes, speed in speeds if nodes == 1), default=0.0)
    on_more = max((speed for _, nodes, speed in speeds if nodes > 1), default=0.0)
    if on_one and on_more and on_one >= on_more:
        return "One node is faster than several."
    for (gpus, nodes, speed), (more, more_nodes, faster) in pairwise(speeds):
        share = (faster - speed) / (more - gpus) / (speed / gpus)
        if share < _PAYS:
            what = "A second node stops" if nodes == 1 < more_nodes else "More GPUs stop"
            return (
                f"{what} paying after {gpus}: up to {more}, each added GPU brings {max(0.0, share):.0%} of what each "
                "of the first brings."
            )
    return "More GPUs pay up to the largest number asked for." if len(points) > 1 else ""


def rows_of(result: ScaleResult) -> tuple[list[str], list[list[str]]]:
    """The titles of a table of all points, and its rows; energy and cost only where they are known."""
    powered = any(point.joules_per_token for point in result.points)
    more = [("J/token", powered), ("cost/1e9", result.price is not None)]
    titles = ["GPUs", "source", "configuration", "tokens/s", "10–90 %", "eff.", "GiB"]
    rows = []
    for point in result.points:
        source = {"none": "nothing fits"}.get(point.source, point.source)
        row = [
            str(point.gpus),
            source if point.is_sure else f"{source}, may fit",
            point.candidate or "",
            _number(point.tokens_per_second, ",.0f"),
            f"{point.low:,.0f}–{point.high:,.0f}" if point.low and point.high else "",
            _number(point.efficiency, ".0%"),
            _number(point.device_gib, ".1f"),
        ]
        seen = [_number(point.joules_per_token, ".3f"), _number(point.cost, ",.2f")]
        rows.append(row + [cell for cell, (_, is_known) in zip(seen, more, strict=True) if is_known])
    return titles + [name for name, is_known in more if is_known], rows


def _number(value: float | None, digits: str) -> str:
    return "" if value is None else format(value, digits)
