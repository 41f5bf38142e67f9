"""`ladder scale`: a tune for each number of GPUs that are here, and what `ladder plan` predicts for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from ladder.errors import NothingFitsError, UsageError
from ladder.events.outcome import Record
from ladder.machine.described import Gpu, Machine, bare_machine
from ladder.machine.gpus import visible_gpus
from ladder.search.belief import believe
from ladder.search.forecast import num_nodes
from ladder.search.space import Space
from ladder.search.speed import lessons
from ladder.tuning.generation_options import require_training
from ladder.tuning.options import TuneOptions
from ladder.tuning.plan_options import PlanOptions
from ladder.tuning.planning import expected_winner, plan_of
from ladder.tuning.run import TuneOutput, run_tune
from ladder.tuning.scale_options import ScaleOptions, counts_in
from ladder.tuning.tune_events import Subscriber, ignore, noting
from ladder.units import gib

_BATCH = 128
"""Sequences per optimizer step. Chosen: as in a tune of a number of GPUs that divides it."""
T = TypeVar("T")
Run = tuple[Space, Sequence[Record]]


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """The fastest configuration on a number of GPUs, as its tune or its plan says."""

    gpus: int
    source: str
    """measured, simulated or predicted."""
    candidate: str | None = None
    """None if nothing was found to fit."""
    tokens_per_second: float | None = None
    low: float | None = None
    """Predicted: it is slower than this with a probability of 10 %."""
    high: float | None = None
    device_gib: float | None = None
    is_sure: bool = True
    """It was measured, or fits with a probability of 99 %."""
    efficiency: float | None = None
    """Tokens/s per GPU, over those of the smallest number of GPUs that has a speed."""
    cost: float | None = None
    """Of a billion tokens."""


def scale_of(
    options: ScaleOptions, tell: Subscriber = ignore, cancelled: Callable[[], bool] = lambda: False
) -> list[ScalePoint]:
    """In ascending order of GPUs; fewer if it was cancelled. NothingFitsError if nothing fits on any of them."""
    require_training(options)
    if options.script or options.map:
        raise UsageError(
            "`ladder scale` compares models, not scripts; name a MODEL, or tune the script at each number."
        )
    counts, batch = counts_in(options.gpus), batch_of(options)
    if uneven := [count for count in counts if batch % count]:
        raise UsageError(
            f"{uneven[0]} GPUs cannot divide the global batch of {batch} sequences evenly; change --gpus or "
            "--global-batch-size."
        )
    here = [] if options.machine else visible_gpus()
    points, seen = [], None
    for count in counts:
        if options.trials and (options.launcher == "simulated" or count <= len(here)):
            try:
                done = run_tune(_tune_options(options, count), tell, cancelled)
            except NothingFitsError:  # refused before any trial
                points.append(ScalePoint(gpus=count, source="predicted"))
                continue
            if done.result.cancelled:
                break
            points.append(_tuned(count, done))
            seen = (done.result.space, done.result.records)
        else:
            memory = options.gpu_memory or (here[0].total_bytes if here else None)
            asked = _shared(options, PlanOptions, gpus=count, gpu_memory=memory, global_batch_size=batch)
            points.append(predicted(asked, noting(tell), seen, gpus_per_node=len(here)))
    if not cancelled() and not any(point.candidate for point in points):
        raise NothingFitsError(
            f"Nothing fits on up to {counts[-1]} GPUs; add larger numbers to --gpus, or see `ladder plan`."
        )
    return _compared(points, options.price)


def batch_of(options: ScaleOptions) -> int:
    """The global batch, the same for all numbers of GPUs."""
    return options.global_batch_size or _BATCH


def _tune_options(options: ScaleOptions, count: int) -> TuneOptions:
    """The options of the tune of `count` GPUs, whose answer is written into a folder of its own."""
    folder = options.output / f"{count}-gpus"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"run_dir": folder / "run", "output": folder / "best_config.json"}
    return _shared(options, TuneOptions, gpus=count, global_batch_size=batch_of(options), **paths)


def _shared(options: ScaleOptions, kind: type[T], **settings: Any) -> T:
    """The options of another command: those that both have, with `settings`."""
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    return kind(**{each.name: getattr(options, each.name) for each in fields(options) if each.name in known} | settings)


def _tuned(count: int, done: TuneOutput) -> ScalePoint:
    point = ScalePoint(gpus=count, source="simulated" if done.simulated else "measured")
    best = done.plain or done.answer
    if best is None:
        return point
    return replace(
        point,
        candidate=best.candidate.key,
        tokens_per_second=best.tokens_per_second,
        device_gib=gib(best.measurement.peak_device),
    )


def predicted(
    options: PlanOptions, note: Callable[[str], None], seen: Run | None = None, *, gpus_per_node: int | None = None
) -> ScalePoint:
    """What `ladder plan` says; after a tune was `seen`, on GPUs like its own, with what its trials taught."""
    machine = None
    if seen is not None:
        engines = seen[0].engines
        tried = {each.consent.switch: True for engine in engines for each in engine.techniques if each.consent.switch}
        options = replace(options, dtype=seen[0].workload.dtype, switches={**tried, **options.switches})
        machine = like(*seen, options.gpus or 1, gpus_per_node)
    found = expected_winner(plan_of(options, note, machine)[0])
    point = ScalePoint(gpus=options.gpus or 1, source="predicted")
    if found is None:
        return point
    return replace(
        point,
        candidate=found.outlook.candidate.key,
        tokens_per_second=found.outlook.tokens_per_second,
        low=found.outlook.pessimistic,
        high=found.outlook.optimistic,
        device_gib=gib(found.outlook.memory.peak),
        is_sure=found.fits == "yes",
    )


def like(space: Space, records: Sequence[Record], count: int, gpus_per_node: int | None) -> Machine:
    """`count` GPUs like those of a tune on one node, and as fast as its trials say."""
    belief, nodes = believe(space, records), num_nodes(count, gpus_per_node)
    rates = dict(space.rates) if belief.trusts_what_is_known else {}
    learned = {name: (mean, deviation) for name, mean, deviation in space.learned if belief.trusts_what_is_known}
    return replace(
        bare_machine(count, space.memory_limit, num_nodes=nodes, host_memory=space.host_memory * nodes),
        gpus=(Gpu("", space.gpu_name or "", space.memory_limit),) * count,
        num_cores=space.num_cores * nodes,
        rates=rates,
        learned=learned | lessons(belief.speed, [engine.rung for engine in space.engines], learned),
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
