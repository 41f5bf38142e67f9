"""Predicts the memory of a candidate, calibrated by what trials measured.

The backend's `moments` give the bytes at each moment of a step, and the largest counts. `predict_memory` needs no GPU;
`calibrate_memory` learns the error of the formulas for this workload on this machine.

**What `peak` means.** PyTorch's allocator keeps freed blocks, so its reserved memory depends on the limit: near the
limit it frees its cache and continues. What a candidate *needs* is between allocated and reserved memory. `peak` is
therefore allocated memory, plus a margin for fragmentation (learnt from reserved memory, but at most `_LARGEST_MARGIN`
of allocated), plus memory outside PyTorch. On a GPU with memory to spare, this is less than what is reserved.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ladder.backends.registry import backend_of
from ladder.candidates import Candidate
from ladder.search.calibration import Datum, Factor, Fit, Unknowns, deviation, fit, names_of, scale
from ladder.step.counted import Device
from ladder.step.host import PROCESS
from ladder.step.ledger import START, Moment
from ladder.units import GIB, MIB
from ladder.workload.workload import Workload

UPPER_DEVIATIONS = 2.33
"""`MemoryPrediction.upper` is this many standard deviations above `peak`. Derived: the 99 % quantile of a normal
distribution."""
_LARGEST_MARGIN = 0.08
"""Of allocated memory. Measured: with a limit of 40 GiB, training with 37.2 GiB allocated reserved 39.5 GiB."""
_LOGITS_DOUBT = ("logits", 0.1)
"""The unknown of the bytes of the usual loss, as a logarithm. Chosen: it is known as well as activations."""


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes per GPU at the peak, by purpose."""

    parameters: int
    gradients: int
    optimizer: int
    """Master weights and the optimizer's state."""
    activations: int
    logits: int
    buffers: int
    """Buckets, copies made to reduce, workspaces, and the allocator's margin."""
    outside_torch: int
    """The CUDA context, NCCL and libraries."""


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """The predicted memory of a candidate, in bytes per GPU; `host` and `pinned` are of all ranks."""

    parts: MemoryParts
    """Their sum is `peak`."""
    moments: Mapping[str, int]
    """Allocated bytes at the start, initialisation, forward, loss, backward and step, before calibration's offset."""
    peak: int
    """The expected need of the GPU, everything included."""
    upper: int
    """About the 99 % quantile of `peak`, from which the probability to fit is derived."""
    host: int
    """Resident host memory of all ranks, processes included."""
    pinned: int
    """The part of `host` that is page-locked, powers of two included."""


@dataclass(frozen=True, kw_only=True)
class MemoryObservation:
    """The memory that a trial measured of one candidate; None for unknown figures."""

    candidate: Candidate
    fits: bool
    peak_device: int | None = None
    """If it did not fit: the least that it would have needed."""
    peak_reserved: int | None = None
    peak_allocated: int | None = None
    outside_torch: int | None = None
    peak_host: int | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryCalibration:
    """What was learnt from measurements; without any, the prior."""

    fit: Fit = field(default_factory=Fit)
    margin: float = 0.04
    """The allocator's fragmentation as a fraction of allocated memory."""
    margin_deviation: float = 0.02
    outside_torch: Mapping[str, int] | None = None
    """The most memory measured outside PyTorch by engine, and for all engines under ""."""
    host_ratio: Mapping[str, float] | None = None
    """Measured divided by predicted host memory by engine, and for all engines under ""."""


class _Footprint:
    """The moments of a candidate and their unknowns: about 10 % of activations and logits (chosen), and an offset.

    `started`: the engine is known to start, so that only the moments of its steps count.
    """

    def __init__(
        self, workload: Workload, candidate: Candidate, world_size: int, device: Device, *, started: bool
    ) -> None:
        backend = backend_of(candidate.engine.rung)
        moments = backend.moments(workload, candidate, world_size, device)
        self.moments = [moment for moment in moments if not (started and moment.name == START)]
        key, kind = candidate.engine.states, _kind(candidate)
        # Less is known on a CPU: freed memory is returned late, and libraries keep scratch space.
        doubt = 1.0 if device == "cuda" else 3.0
        own = (f"slope:{key}:{kind}", 0.03 * doubt)
        # With half checkpointing, most activations belong to the half that is not checkpointed.
        self._activations: Factor = ((f"activations:{kind.replace('half', 'whole')}", 0.1 * doubt), own)
        losses = (each.loss_doubt for each in candidate.engine.techniques if each.loss_doubt)
        self._logits: Factor = (next(losses, _LOGITS_DOUBT), own)
        self._buffers: Factor = (("buffers", 0.15),)
        self._live: Factor = (("live", 0.1),)
        states = self.moments[0].parameters + self.moments[0].optimizer
        unit = 0.01 * states + 0.15 * GIB if device == "cuda" else 0.25 * states + 32 * MIB
        self._offset: Factor = ((f"offset:{key}", unit), (f"offset:{key}:{kind}", 0.3 * unit))
        self.names = names_of(self._activations, self._logits, self._buffers, self._live, self._offset)

    def totals(self, unknowns: Unknowns) -> list[float]:
        """Allocated bytes at each moment, without the offset."""
        activations, logits = scale(self._activations, unknowns), scale(self._logits, unknowns)
        buffers, live = scale(self._buffers, unknowns), scale(self._live, unknowns)
        return [
            moment.parameters
            + moment.gradients
            + moment.optimizer
            + activations * moment.activations
            + logits * moment.logits
            + buffers * moment.buffers
            + live * moment.live
            for moment in self.moments
        ]

    def log_peak(self, unknowns: Unknowns) -> float:
        """The logarithm of allocated memory at the peak."""
        peak = max(self.totals(unknowns))
        return math.log(max(peak + deviation(self._offset, unknowns), 0.3 * peak))


def _kind(candidate: Candidate) -> str:
    """A name for what a block saves, which depends on checkpointing and some techniques."""
    kind = {"on": "ckpt", "cpu": "ckpt", "off": "whole"}.get(candidate.checkpointing, "half")
    return "+".join([kind, *(each.name for each in candidate.engine.techniques if each.changes_blocks)])


def predict_memory(
    workload: Workload,
    candidate: Candidate,
    *,
    world_size: int,
    device: Device,
    calibration: MemoryCalibration | None = None,
    started: bool = False,
) -> MemoryPrediction:
    """The memory of `candidate` on each of `world_size` ranks of one node, whose engine may have `started` before."""
    calibration = calibration or MemoryCalibration()
    footprint = _Footprint(workload, candidate, world_size, device, started=started)
    mean, relative = calibration.fit.predict(footprint.log_peak, footprint.names)
    allocated = math.exp(mean)
    outside, outside_deviation = _outside(calibration, candidate.engine.states, world_size, device)
    margin, margin_deviation = (calibration.margin, calibration.margin_deviation) if device == "cuda" else (0.0, 0.0)
    peak = allocated * (1 + margin) + outside
    spread = math.hypot(allocated * math.hypot(relative, margin_deviation), outside_deviation)
    host, pinned = predict_host(workload, candidate, world_size, calibration.host_ratio or {})
    moments: dict[str, int] = {}
    totals = footprint.totals(calibration.fit.values)
    for moment, total in zip(footprint.moments, totals, strict=True):
        moments[moment.name] = max(moments.get(moment.name, 0), int(total))
    return MemoryPrediction(
        parts=_parts(footprint.moments[totals.index(max(totals))], peak, outside),
        moments=moments,
        peak=int(peak),
        upper=int(peak + UPPER_DEVIATIONS * spread),
        host=host,
        pinned=pinned,
    )


def expected_peak(workload: Workload, candidate: Candidate, *, world_size: int, device: Device) -> int:
    """`predict_memory(…).peak` before any trial, without its uncertainty, which takes most of the time."""
    prior = MemoryCalibration()
    allocated = math.exp(_Footprint(workload, candidate, world_size, device, started=False).log_peak({}))
    outside, _ = _outside(prior, candidate.engine.states, world_size, device)
    return int(allocated * (1 + (prior.margin if device == "cuda" else 0.0)) + outside)


def calibrate_memory(
    workload: Workload, observations: Sequence[MemoryObservation], *, world_size: int, device: Device
) -> MemoryCalibration:
    """What follows from `observations` for this workload on this machine; useful from the first one on."""
    fitting = [o for o in observations if o.fits]
    outside: dict[str, int] = {}
    margins = []
    for seen in fitting:
        if seen.outside_torch is not None:
            for key in ("", seen.candidate.engine.states):
                outside[key] = max(outside.get(key, 0), seen.outside_torch)
        if device == "cuda" and seen.peak_reserved and seen.peak_allocated:
            margins.append(min(_LARGEST_MARGIN, max(0.0, seen.peak_reserved / seen.peak_allocated - 1)))
    margin, scatter = _learnt_margin(margins)
    known = MemoryCalibration(
        margin=margin,
        margin_deviation=scatter,
        outside_torch=outside or None,
        host_ratio=host_ratios(workload, fitting, world_size) or None,
    )
    data = [datum for seen in observations if (datum := _datum(workload, seen, known, world_size, device)) is not None]
    return replace(known, fit=fit(data))


def _learnt_margin(margins: Sequence[float]) -> tuple[float, float]:
    """Mean and deviation of the allocator's margin, shrunk towards the prior, which counts as two measurements."""
    prior = MemoryCalibration()
    number = len(margins)
    scatter = statistics.pstdev(margins) if number > 1 else prior.margin_deviation
    mean = (2 * prior.margin + sum(margins)) / (2 + number)
    return mean, max(0.01, (2 * prior.margin_deviation + number * scatter) / (2 + number))


def _datum(
    workload: Workload, seen: MemoryObservation, known: MemoryCalibration, world_size: int, device: Device
) -> Datum | None:
    """`seen` as data for the fit: allocated memory, or its lower bound if memory ran out."""
    target: float | None = seen.peak_allocated if device == "cuda" or not seen.peak_device else seen.peak_device
    if not seen.fits:
        if seen.peak_device is None:
            return None
        outside, _ = _outside(known, seen.candidate.engine.states, world_size, device)
        bound = (seen.peak_device - outside) / (1 + (known.margin if device == "cuda" else 0.0))
        target = max(bound, seen.peak_allocated or 0)
    if target is None or target <= 0:
        return None
    footprint = _Footprint(workload, seen.candidate, world_size, device, started=True)
    return Datum(
        formula=footprint.log_peak,
        names=footprint.names,
        target=math.log(target),
        noise=0.01 if device == "cuda" else 0.03,
        is_lower_bound=not seen.fits,
    )


def _outside(calibration: MemoryCalibration, engine: str, world_size: int, device: Device) -> tuple[float, float]:
    """Bytes outside PyTorch and their standard deviation: context, libraries, NCCL.

    Measured on H200: 1.7 GiB alone, 2.1 GiB on four; less on smaller GPUs.
    """
    if device == "cpu":
        return 0.0, 0.0
    seen = calibration.outside_torch or {}
    if engine in seen:
        return float(seen[engine]), 0.05 * GIB
    if "" in seen:
        return float(seen[""]), 0.15 * GIB
    return (1.8 * GIB, 0.4 * GIB) if world_size > 1 else (1.4 * GIB, 0.35 * GIB)


def _parts(moment: Moment, peak: float, outside: float) -> MemoryParts:
    """The peak by part; the margin and calibration's corrections are added to the buffers."""
    named = {
        "parameters": int(moment.parameters + moment.live),
        "gradients": int(moment.gradients),
        "optimizer": int(moment.optimizer),
        "activations": int(moment.activations),
        "logits": int(moment.logits),
        "outside_torch": int(outside),
    }
    return MemoryParts(**named, buffers=int(peak) - sum(named.values()))


def predict_host(
    workload: Workload, candidate: Candidate, world_size: int, ratios: Mapping[str, float]
) -> tuple[int, int]:
    """Predicted host memory of all ranks, and its pinned part, in bytes."""
    on_host, pinned = backend_of(candidate.engine.rung).host_bytes(workload, candidate, world_size)
    total = PROCESS * world_size + on_host
    ratio = ratios.get(candidate.engine.states, ratios.get("", 1.0))
    return int(total * ratio), int(pinned)


def host_ratios(workload: Workload, fitting: Sequence[MemoryObservation], world_size: int) -> dict[str, float]:
    """Measured divided by predicted host memory by engine; under "" the geometric mean, for engines not measured."""
    by_engine: dict[str, list[float]] = {}
    for seen in fitting:
        if seen.peak_host:
            expected, _ = predict_host(workload, seen.candidate, world_size, {})
            by_engine.setdefault(seen.candidate.engine.states, []).append(seen.peak_host / expected)
    ratios = {engine: max(seen) for engine, seen in by_engine.items()}
    if ratios:
        ratios[""] = statistics.geometric_mean(ratios.values())
    return ratios
