"""What the history says about the candidates not tried: will they fit, how fast are they, how sure is that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

from ladder.candidates import Candidate
from ladder.outcome import Record
from ladder.search.calibration import Fit
from ladder.search.hardware import MachineSpeed, machine_speed
from ladder.search.memory import (
    UPPER_DEVIATIONS,
    MemoryCalibration,
    MemoryObservation,
    MemoryPrediction,
    calibrate_memory,
    predict_memory,
)
from ladder.search.space import Space, failed_in_setup, measured
from ladder.search.speed import (
    STEP_NOISE,
    SpeedCalibration,
    SpeedObservation,
    SpeedPrediction,
    calibrate_speed,
    predict_speed,
)

_HOST_DEVIATION = 0.10
"""Relative error of predicted host memory; confirmed within 6 % on one machine."""
SLIM = 0.03
"""A candidate less likely to fit than this is not tried."""
_NORMAL = NormalDist()
_QUANTILE_90 = 1.28


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is believed about one candidate."""

    candidate: Candidate
    memory: MemoryPrediction
    speed: SpeedPrediction
    fits: float
    """The probability that it fits, on the device and on the host."""
    deviation: float
    """Of the logarithm of its speed."""

    @property
    def optimistic(self) -> float:
        """Tokens/s that it exceeds with 10 % only."""
        return self.speed.tokens_per_second * math.exp(_QUANTILE_90 * math.hypot(self.deviation, STEP_NOISE))


@dataclass(frozen=True, kw_only=True)
class Belief:
    """Both models, calibrated with a history."""

    space: Space
    machine: MachineSpeed
    memory: MemoryCalibration
    speed: SpeedCalibration
    host_ceiling: float
    """Predicted host memory, in bytes, from which on a trial has run out of it; infinite if none has."""

    def outlook(self, candidate: Candidate) -> Outlook:
        """Prediction and doubt for `candidate`."""
        space = self.space
        memory = predict_memory(
            space.workload, candidate, world_size=space.world_size, device=device_of(space), calibration=self.memory
        )
        speed = predict_speed(
            space.workload, candidate, world_size=space.world_size, machine=self.machine, calibration=self.speed
        )
        return Outlook(
            candidate=candidate,
            memory=memory,
            speed=speed,
            fits=self._probability(memory),
            deviation=self.speed.fit.deviation(speed.estimate),
        )

    def ahead(self, one: Outlook, other: Outlook) -> tuple[float, float]:
        """By how much `one` is faster than `other`, as a logarithm, and that figure's standard deviation.

        What both have in common, such as an engine's own factor, does not count as doubt.
        """
        difference = other.speed.estimate.minus(one.speed.estimate)
        return difference.mean, self.speed.fit.deviation(difference)

    def _probability(self, memory: MemoryPrediction) -> float:
        deviation = max(1.0, (memory.upper - memory.peak) / UPPER_DEVIATIONS)
        on_device = _NORMAL.cdf((self.space.memory_limit - memory.peak) / deviation)
        if memory.host >= self.host_ceiling:
            return 0.0
        on_host = _NORMAL.cdf((self.space.host_memory / memory.host - 1) / _HOST_DEVIATION)
        return on_device * on_host


def believe(space: Space, records: Sequence[Record]) -> Belief:
    """Both models, calibrated with what `records` say about this space's candidates."""
    seen = [(space.by_key[key], record) for key, record in measured(records).items() if key in space.by_key]
    machine = machine_speed(space.gpu_name, device_of(space), space.world_size, space.num_cores)
    memory = [observation for pair in seen if (observation := _memory_observation(space, *pair)) is not None]
    speed = [
        SpeedObservation(
            candidate=candidate,
            boundary_seconds=record.measurement.boundary_seconds,
            accumulate_seconds=record.measurement.accumulate_seconds,
        )
        for candidate, record in seen
        if record.measurement is not None
    ]
    known = calibrate_memory(space.workload, memory, world_size=space.world_size, device=device_of(space))
    belief = Belief(
        space=space,
        machine=machine,
        memory=known,
        speed=calibrate_speed(space.workload, speed, world_size=space.world_size, machine=machine)
        if speed
        else SpeedCalibration(fit=Fit()),
        host_ceiling=math.inf,
    )
    return replace(belief, host_ceiling=_host_ceiling(belief, seen))


def device_of(space: Space) -> Literal["cuda", "cpu"]:
    return "cuda" if space.device == "cuda" else "cpu"


def _host_ceiling(belief: Belief, seen: Sequence[tuple[Candidate, Record]]) -> float:
    """The least predicted host memory of what ran out of it."""
    out = [candidate for candidate, record in seen if record.outcome.kind in ("host_oom", "pinned_oom")]
    return min((belief.outlook(candidate).memory.host for candidate in out), default=math.inf)


def _memory_observation(space: Space, candidate: Candidate, record: Record) -> MemoryObservation | None:
    """What `record` says about memory: the peak, or the least it would have been; None if it says nothing."""
    measurement, outcome = record.measurement, record.outcome
    if measurement is not None:
        return MemoryObservation(
            candidate=candidate,
            fits=True,
            peak_device=measurement.peak_device,
            peak_reserved=measurement.peak_reserved,
            peak_allocated=measurement.peak_allocated,
            outside_torch=measurement.outside_torch,
            peak_host=measurement.peak_host,
        )
    if outcome.kind != "gpu_oom" or failed_in_setup(outcome):
        return None
    missing = (outcome.bytes_asked or 0) - (outcome.bytes_free or 0)
    return MemoryObservation(candidate=candidate, fits=False, peak_device=space.memory_limit + max(0, missing))
