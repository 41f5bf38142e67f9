"""`ladder scale`: what `ladder plan` predicts for each of several numbers of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ladder.errors import NothingFitsError, UsageError
from ladder.options.generation import require_training
from ladder.options.plan import PaperOptions, PlanOptions, ScaleOptions
from ladder.options.tune import MOST_GPUS
from ladder.tuning.planning import expected_winner, plan_of
from ladder.units import gib

_BATCH = 128
"""Sequences per optimizer step. Chosen: as in a tune of a number of GPUs that divides it."""


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """The fastest configuration on a number of GPUs, as its plan says."""

    gpus: int
    candidate: str | None = None
    """None if nothing is predicted to fit."""
    tokens_per_second: float | None = None
    low: float | None = None
    """It is slower than this with a probability of 10 %."""
    high: float | None = None
    device_gib: float | None = None
    is_sure: bool = True
    """It fits with a probability of 99 %."""
    efficiency: float | None = None
    """Tokens/s per GPU, over those of the smallest number of GPUs that has a speed."""
    cost: float | None = None
    """Of a billion tokens."""


def scale_of(options: ScaleOptions, note: Callable[[str], None]) -> list[ScalePoint]:
    """In ascending order of GPUs; `note` as in `plan_of`. NothingFitsError if nothing fits on any of them."""
    require_training(options)
    if options.script or options.map:
        raise UsageError(
            "`ladder scale` compares models, not scripts; name a MODEL, or tune the script at each number."
        )
    counts, batch = _counts_in(options.gpus), batch_of(options)
    if uneven := [count for count in counts if batch % count]:
        raise UsageError(
            f"{uneven[0]} GPUs cannot divide the global batch of {batch} sequences evenly; change --gpus or "
            "--global-batch-size."
        )
    shared = {each.name: getattr(options, each.name) for each in fields(PaperOptions)} | {"global_batch_size": batch}
    points = [_predicted(PlanOptions(**shared, gpus=count), count, note) for count in counts]
    if not any(point.candidate for point in points):
        raise NothingFitsError(
            f"Nothing fits on up to {counts[-1]} GPUs; add larger numbers to --gpus, or see `ladder plan`."
        )
    return _compared(points, options.price)


def batch_of(options: ScaleOptions) -> int:
    """The global batch, the same for all numbers of GPUs."""
    return options.global_batch_size or _BATCH


def _counts_in(text: str) -> list[int]:
    """The numbers in `1,2,4`, in ascending order. UsageError for anything else."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 1 <= int(word[:9]) <= MOST_GPUS for word in words):
        raise UsageError(f"--gpus: {text[:60]!r} is not valid; give numbers from 1 to {MOST_GPUS}, such as 1,2,4,8.")
    return sorted(set(map(int, words)))


def _predicted(options: PlanOptions, count: int, note: Callable[[str], None]) -> ScalePoint:
    found = expected_winner(plan_of(options, note)[0])
    if found is None:
        return ScalePoint(gpus=count)
    return ScalePoint(
        gpus=count,
        candidate=found.outlook.candidate.key,
        tokens_per_second=found.outlook.tokens_per_second,
        low=found.outlook.pessimistic,
        high=found.outlook.optimistic,
        device_gib=gib(found.outlook.memory.peak),
        is_sure=found.fits == "yes",
    )


def _compared(points: Sequence[ScalePoint], price: float | None) -> list[ScalePoint]:
    """`points` with their efficiency, and with the cost of a billion tokens if a GPU-hour has a `price`."""
    each = {point.gpus: point.tokens_per_second / point.gpus for point in points if point.tokens_per_second}
    first = next(iter(each.values()), None)
    return [
        replace(point, efficiency=speed / first, cost=1e9 / speed / 3600 * price if price else None)
        if first and (speed := each.get(point.gpus))
        else point
        for point in points
    ]


def as_json(options: ScaleOptions, points: Sequence[ScalePoint]) -> dict[str, Any]:
    """The comparison as values for JSON."""
    return {
        "model": options.model,
        "global_batch_size": batch_of(options),
        "price_per_gpu_hour": options.price,
        "points": [asdict(point) for point in points],
    }
