"""The DeepSpeed knobs of the winning engine: which values to choose from, and when a gain is more than noise.

An engine with knobs is an engine like any other, and is measured in a trial. An optimizer (ladder/tuning/knob_study.py)
chooses which values to try next, from these choices and the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ladder.backends.registry import backend_of
from ladder.candidates import Candidate, Engine
from ladder.events.outcome import Record
from ladder.search.space import Space, measured, ranking
from ladder.search.speed import STEP_NOISE
from ladder.workload.workload import Workload

_NOISES = 2.0
"""A gain counts if it exceeds the noise this many times. Chosen: one standard deviation is often chance."""


def knobs_of(workload: Workload, engine: Engine, world_size: int) -> dict[str, bool | int]:
    """The values of all knobs of `engine` that have choices."""
    backend = backend_of(engine.rung)
    values = backend.knobs(workload, engine, world_size)
    return {name: values[name] for name in backend.knob_choices(workload, engine, world_size)}


def with_knobs(
    workload: Workload, candidate: Candidate, values: Mapping[str, bool | int], world_size: int
) -> Candidate:
    """`candidate` with its knobs set to `values`; those equal to our defaults are not in its key."""
    usual = knobs_of(workload, Engine(candidate.engine.rung), world_size)
    turned = tuple(sorted((name, value) for name, value in values.items() if usual[name] != value))
    return replace(candidate, engine=replace(candidate.engine, knobs=turned))


def plain(candidate: Candidate) -> Candidate:
    """The same candidate with our default knobs."""
    return replace(candidate, engine=replace(candidate.engine, knobs=()))


def turned(space: Space, records: Sequence[Record]) -> dict[str, Record]:
    """The records of measured candidates with other knobs than the defaults, by key."""
    return {key: record for key, record in measured(records).items() if key not in space.by_key}


def winner(space: Space, records: Sequence[Record]) -> Candidate | None:
    """The candidate whose knobs to try: the fastest one with default knobs."""
    own = [record for record in ranking(records) if record.candidate_key in space.by_key]
    return space.by_key[own[0].candidate_key] if own else None


def less_noise(space: Space, records: Sequence[Record]) -> list[Record]:
    """`records` without settings of knobs whose gain over the defaults may be noise."""
    seen = measured(records)
    noise = set()
    for key, record in turned(space, records).items():
        other = seen.get(plain(space.by_key[key]).key)
        if other is None or not _gains(record, other):
            noise.add(key)
    return [record for record in records if record.candidate_key not in noise]


def _gains(record: Record, other: Record) -> bool:
    """Whether `record` is faster than `other` by more than their noise; True for one that does not fit, to keep it."""
    if not record.tokens_per_second or not other.tokens_per_second:
        return not record.tokens_per_second
    spreads = [each.measurement.spread for each in (record, other) if each.measurement is not None]
    noise = max(STEP_NOISE, *spreads)
    return record.tokens_per_second > other.tokens_per_second * (1 + _NOISES * noise)
