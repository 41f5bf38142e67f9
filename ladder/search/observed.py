"""What a record says of a candidate's speed and memory, as the models that are calibrated by it take it."""

from __future__ import annotations

import math

from ladder.candidates import Candidate
from ladder.events.outcome import Measurement, Record
from ladder.search.memory import MemoryObservation
from ladder.search.space import Space, failed_in_setup
from ladder.search.speed import STEP_NOISE, SpeedObservation

_NOISE_OF_ONE_STEP = 0.04
"""Relative error of a single timed step, which may be disturbed. Chosen: as `StepPolicy.disagreement`, above which a
third step is timed."""
_NOISE_OF_THRASHING = 0.5
"""Relative error near the limit, where the allocator repeatedly empties its cache. Chosen: such a candidate says
nothing about those with enough memory. Measured: its update took up to 1.8 s instead of 0.1 s with FSDP2 (Llama-2-7B on
two H200); with an error of 0.1, such trials surprised the search so much that it doubted all other predictions."""


def speed_observation(space: Space, candidate: Candidate, record: Record) -> SpeedObservation | None:
    """The step times in `record`, of a probe those of a few layers; None if nothing was timed."""
    measurement = record.measurement
    if measurement is None:
        return None
    return SpeedObservation(
        candidate=candidate,
        boundary_seconds=measurement.boundary_seconds,
        accumulate_seconds=measurement.accumulate_seconds,
        shallow=space.shallow if record.purpose == "probe" else None,
        noise=_noise(measurement),
    )


def memory_observation(space: Space, candidate: Candidate, record: Record) -> MemoryObservation | None:
    """The peak memory in `record`, or the least that it would have been; None if memory is not known."""
    measurement, outcome = record.measurement, record.outcome
    if measurement is not None:
        return MemoryObservation(
            candidate=candidate,
            fits=True,
            peak_device=measurement.peak_device,
            peak_reserved=measurement.peak_reserved,
            peak_allocated=measurement.peak_allocated,
            outside_torch=measurement.outside_torch,
            peak_host=measurement.held_host or measurement.peak_host,
        )
    if outcome.kind != "gpu_oom" or failed_in_setup(outcome):
        return None
    missing = (outcome.bytes_asked or 0) - (outcome.bytes_free or 0)
    return MemoryObservation(candidate=candidate, fits=False, peak_device=space.memory_limit + max(0, missing))


def _noise(measurement: Measurement) -> float:
    """The relative error of measured step times. Near the memory limit, they are slower than the model expects."""
    if measurement.alloc_retries:
        return _NOISE_OF_THRASHING
    if measurement.num_steps < 2:
        return _NOISE_OF_ONE_STEP
    return max(STEP_NOISE, measurement.spread / math.sqrt(measurement.num_steps))  # large if the host disturbs them all
