"""What the history says about the candidates not tried: will they fit, how fast are they, how sure is that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Literal

from ladder.candidates import Candidate
from ladder.events.outcome import Measurement, Record
from ladder.machine.machine_speed import MachineSpeed, machine_speed
from ladder.search.memory import (
    UPPER_DEVIATIONS,
    MemoryCalibration,
    MemoryObservation,
    MemoryPrediction,
    calibrate_memory,
    host_ratios,
    predict_host,
    predict_memory,
)
from ladder.search.space import Space, failed_in_setup, measured, probed
from ladder.search.speed import (
    STEP_NOISE,
    SpeedCalibration,
    SpeedObservation,
    SpeedPrediction,
    calibrate_speed,
    predict_speed,
)
from ladder.workload.workload import Workload

HOST_DEVIATION = 0.10
"""Relative error of predicted host memory. Chosen: it was confirmed within 6 % on one machine, and others may stray
more."""
_NOISE_OF_ONE_STEP = 0.04
"""Relative: a single timed step may be the one that something disturbed. Chosen: as `StepPolicy.disagreement`, from
which on a third step is timed."""
_NOISE_OF_THRASHING = 0.1
"""Relative: near the limit the allocator empties its cache again and again. Chosen: wide enough for such a candidate to
say little about those with memory to spare. Taken at its word, one led the search astray by more than 5 %
(benchmarks/results/search)."""
SLIM = 0.03
"""A candidate less likely to fit than this is not tried. Chosen: thirty failed trials for one that fits are too
many."""
LIKELY = 0.5
"""One at least this likely to fit is said to. Chosen: more likely than not."""
_NORMAL = NormalDist()
QUANTILE_90 = 1.28
"""Derived: the 90 % quantile of a normal distribution, in standard deviations."""


@dataclass(frozen=True)
class Outlook:
    """What is believed about one candidate; each part is worked out when it is first asked for."""

    candidate: Candidate
    belief: Belief = field(repr=False)
    shallow: bool = False
    """Of the candidate in a probe: of its speed alone, and with a few layers."""

    @property
    def workload(self) -> Workload:
        return self.belief.space.shallow if self.shallow else self.belief.space.workload

    @cached_property
    def memory(self) -> MemoryPrediction:
        space = self.belief.space
        return predict_memory(
            space.workload,
            self.candidate,
            world_size=space.world_size,
            device=device_of(space),
            calibration=self.belief.memory,
        )

    @cached_property
    def host(self) -> int:
        """Bytes of host memory of all ranks, as in `memory`, without the work that the device's takes."""
        space = self.belief.space
        return predict_host(space.workload, self.candidate, space.world_size, self.belief.host_ratios)[0]

    @cached_property
    def speed(self) -> SpeedPrediction:
        space = self.belief.space
        return predict_speed(
            self.workload,
            self.candidate,
            world_size=space.world_size,
            machine=self.belief.machine,
            calibration=self.belief.speed,
            shallow=self.shallow,
        )

    @cached_property
    def fits(self) -> float:
        """The probability that it fits, on the device and on the host."""
        memory, space = self.memory, self.belief.space
        if memory.host >= self.belief.host_ceiling:
            return 0.0
        deviation = max(1.0, (memory.upper - memory.peak) / UPPER_DEVIATIONS)
        on_device = _NORMAL.cdf((space.memory_limit - memory.peak) / deviation)
        return on_device * _NORMAL.cdf((space.host_memory / memory.host - 1) / HOST_DEVIATION)

    @property
    def deviation(self) -> float:
        """Of the logarithm of its speed."""
        return self.speed.deviation

    @property
    def optimistic(self) -> float:
        """Tokens/s that it exceeds with 10 % only."""
        return self.speed.tokens_per_second * math.exp(QUANTILE_90 * math.hypot(self.deviation, STEP_NOISE))

    def ahead_of(self, other: Outlook) -> tuple[float, float]:
        """By how much this is faster than `other`, as a logarithm, and that figure's standard deviation.

        What both have in common, such as an engine's own factor, does not count as doubt.
        """
        difference = other.speed.estimate.minus(self.speed.estimate)
        return difference.mean, self.belief.speed.fit.deviation(difference)

    def still_possible(self, target: float, after: Outlook, quantile: float) -> float:
        """The probability that `target`, in tokens/s, will still be within its reach once `after` is measured.

        It is, if no more than `quantile` of the standard deviations that are then left would take it there.
        """
        _, left = self.ahead_of(after)
        left = math.hypot(left, STEP_NOISE)
        learnt = math.sqrt(max(1e-9, self.deviation**2 - left**2))
        mean = math.log(self.speed.tokens_per_second / target)
        return _NORMAL.cdf((mean + quantile * left) / learnt)


@dataclass(frozen=True, eq=False)
class Belief:
    """Both models, each calibrated with a history when it is first asked for."""

    space: Space
    seen: Sequence[tuple[Candidate, Record]]
    """What measuring trials tried."""
    probed: Sequence[tuple[Candidate, Record]] = ()
    """What probes tried."""

    def outlook(self, candidate: Candidate, *, shallow: bool = False) -> Outlook:
        """Prediction and doubt for `candidate`, or for a probe of it."""
        return Outlook(candidate, self, shallow)

    @cached_property
    def machine(self) -> MachineSpeed:
        space = self.space
        return machine_speed(space.gpu_name, device_of(space), space.world_size, space.num_cores, space.num_nodes)

    @cached_property
    def _memory_seen(self) -> list[MemoryObservation]:
        return [found for pair in self.seen if (found := _memory_observation(self.space, *pair)) is not None]

    @cached_property
    def memory(self) -> MemoryCalibration:
        space = self.space
        return calibrate_memory(space.workload, self._memory_seen, world_size=space.world_size, device=device_of(space))

    @cached_property
    def host_ratios(self) -> dict[str, float]:
        """Measured over predicted host memory, by engine, and under "" over all."""
        fitting = [seen for seen in self._memory_seen if seen.fits]
        return host_ratios(self.space.workload, fitting, self.space.world_size)

    @cached_property
    def speed(self) -> SpeedCalibration:
        space = self.space
        observations = [
            SpeedObservation(
                candidate=candidate,
                boundary_seconds=record.measurement.boundary_seconds,
                accumulate_seconds=record.measurement.accumulate_seconds,
                shallow=space.shallow if record.purpose == "probe" else None,
                noise=_noise(record.measurement),
            )
            for candidate, record in (*self.seen, *self.probed)
            if record.measurement is not None
        ]
        return calibrate_speed(space.workload, observations, world_size=space.world_size, machine=self.machine)

    @cached_property
    def host_ceiling(self) -> float:
        """Predicted host memory, in bytes, from which on a trial has run out of it; infinite if none has."""
        out = [candidate for candidate, record in self.seen if record.outcome.kind in ("host_oom", "pinned_oom")]
        return min((self.outlook(candidate).host for candidate in out), default=math.inf)


def believe(space: Space, records: Sequence[Record]) -> Belief:
    """What `records` say about this space's candidates."""
    seen, shallow = (
        [(space.by_key[key], record) for key, record in found.items() if key in space.by_key]
        for found in (measured(records), probed(records))
    )
    return Belief(space, seen, shallow)


def device_of(space: Space) -> Literal["cuda", "cpu"]:
    return "cuda" if space.device == "cuda" else "cpu"


def _noise(measurement: Measurement) -> float:
    """How far measured step times may be off. What thrashes is slower than the same with memory to spare."""
    if measurement.alloc_retries:
        return _NOISE_OF_THRASHING
    if measurement.num_steps < 2:
        return _NOISE_OF_ONE_STEP
    return max(STEP_NOISE, measurement.spread / math.sqrt(measurement.num_steps))  # where the host disturbs all steps


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
