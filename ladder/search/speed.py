"""Predicts how long a step of a candidate takes, calibrated by what trials measured.

The seconds of a step's parts (`step.clock`) are the prior for every machine; each has unknown factors, some of which it
shares with other engines, and `calibrate_speed` learns them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from ladder.backends.registry import backend_of, family_of, is_main, kin_of
from ladder.candidates import Candidate, Rung
from ladder.machine.machine_speed import MachineSpeed
from ladder.search.calibration import Datum, Estimate, Factor, Fit, Unknowns, fit, names_of, scale
from ladder.step.clock import micro_step
from ladder.workload.workload import Workload

_QUANTILE_95 = 1.645
"""Derived: the 95 % quantile of a normal distribution, so that 90 % lie between both ends."""
STEP_NOISE = 0.015
"""Relative error of step times between trials, and of the formula itself. Chosen: a little more than the 1 % to which a
median is timed (`StepPolicy.target_spread`)."""
_DEPTH = 0.07
"""Relative error of predicting the speed with all layers from a probe with a few. Measured at micro-batches of 4 and 8:
4 to 10 % from 4 to 32 layers of Llama-2-7B, with offload. The error is independent between families of rungs."""
_DEPTH_OF_UPDATE = 0.17
"""As `_DEPTH`, for the optimizer alone. Measured: up to 20 % of a step without accumulation."""

_SHARED = {
    "compute": 0.35,
    "launch": 0.5,
    "reduce": 0.4,
    "handling": 0.4,
    "gather": 0.4,
    "exchange": 0.5,
    "inputs": 0.4,
    "update": 0.4,
}
"""By term of a step: the uncertainty of the machine, which all engines share, on a GPU whose data sheet is known."""
_RECORDED = (0.15, 0.85, 0.15)
"""On a machine of which sweeps were recorded, factors on the uncertainty of what engines do not share: of the whole, of
its terms, and of kernels. Chosen: errors there are a tenth to a half of what is doubted elsewhere
(benchmarks/doubts.py), and with these, recorded sweeps take a quarter less time and lose 0.7 % at most
(benchmarks/results/search)."""
_RECORDED_ELSEWHERE = (0.4, 0.85, 1.0)
"""The same for other backends than the main one. Chosen: no whole sweep of them was recorded, and in stored tunes their
errors are larger (benchmarks/prior.py)."""
_LAUNCH_ELSEWHERE, _LAUNCH_OF_STAGE_3 = 0.4, 0.25
"""As in `_SHARED`, of the host's work in another backend's hooks, and in those of stage 3. Measured: FSDP2's take 1.6
to 4.4 ms a layer, those of stage 3 10 to 20 ms."""
_WITH = {"compute": ("ramp",)}
"""Terms that an unknown of another term scales too."""
_MATTERS = 0.2
"""The least share of a measured step that a term must have for the measurements to tell of it. Chosen: matrix products
take a hundredth of opt-125m's steps with small micro-batches, and what slowed these was taken for slow arithmetic."""
_LEAST_LEFT = 0.5
"""What remains at least of a shared uncertainty after a tune, for one of another model. Chosen: a factor of one model
holds errors of the formula, too, which are half of what recorded sweeps of several models differ by."""


@dataclass(frozen=True, kw_only=True)
class SpeedPrediction:
    """The predicted time of a candidate's steps, and its uncertainty."""

    accumulate_seconds: float
    """A micro-step without the optimizer."""
    boundary_seconds: float
    """A micro-step with the optimizer."""
    tokens_per_second: float
    """Of all ranks together, with the candidate's accumulation."""
    estimate: Estimate
    """The logarithm of the optimizer step's seconds, for comparing candidates."""
    fit: Fit = field(repr=False)
    """The fit with which it was predicted."""

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of `estimate`; computed only when needed, because it uses the whole covariance."""
        return self.fit.deviation(self.estimate)

    @property
    def low(self) -> float:
        """With a probability of 90 %, the step time is between `low` and `high` times the prediction."""
        return 1 / self.high

    @property
    def high(self) -> float:
        return math.exp(_QUANTILE_95 * math.hypot(self.deviation, STEP_NOISE))

    def step_seconds(self, accumulation: int) -> float:
        """Seconds of one optimizer step of `accumulation` micro-steps."""
        return (accumulation - 1) * self.accumulate_seconds + self.boundary_seconds


@dataclass(frozen=True, kw_only=True)
class SpeedObservation:
    """What a trial measured of one candidate."""

    candidate: Candidate
    shallow: Workload | None = None
    """For a probe: the workload with a few layers."""
    boundary_seconds: float
    accumulate_seconds: float | None = None
    noise: float = STEP_NOISE
    """The relative error of these times."""


@dataclass(frozen=True, kw_only=True)
class SpeedCalibration:
    """What was learnt from measurements; without any, the prior."""

    fit: Fit = field(default_factory=Fit)
    data: Sequence[Datum] = field(default=(), repr=False)
    """What was measured."""


class _Steps:
    """The times of a candidate's steps and their unknowns, with standard deviations as logarithms."""

    def __init__(
        self, workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed, shallow: bool = False
    ) -> None:
        rung, family = candidate.engine.rung, family_of(candidate.engine.rung)
        own, by_kind = partial(_own, candidate), partial(_by_kind, candidate.checkpointed)
        of_whole, of_terms, of_kernels = _doubted(rung, machine)
        step = backend_of(rung).assignment(workload, candidate, world_size)
        parts, shared = step.time_on(machine), {}
        for term, sigma in _SHARED.items():
            name = _shared_name(term, rung)
            mean, deviation = machine.belief(name, sigma)
            shared[term] = (name, deviation)
            moved = {of: getattr(parts, of) * math.exp(mean) for of in (term, *_WITH.get(term, ()))}
            parts = replace(parts, **moved) if mean else parts
        self._parts = parts
        self._compute: Factor = (shared["compute"], *by_kind("compute", 0.08), (f"compute:{family}", 0.06 * of_kernels))
        self._ramp: Factor = (("ramp", 0.8),)
        self._launch: Factor = (shared["launch"], *_hooks(candidate, of_terms))
        self._reduce: Factor = (shared["reduce"], *own("reduce", 0.4 * of_terms)) if parts.reduce else ()
        self._handling: Factor = (shared["handling"],) if parts.handling else ()
        kinds = (*by_kind("gather", 0.1), *by_kind(f"gather:{family}", 0.1))
        self._gather: Factor = (shared["gather"], *own("gather", 0.3 * of_terms), *kinds) if parts.gather else ()
        self._exchange: Factor = (shared["exchange"],) if parts.exchange else ()
        self._inputs: Factor = (shared["inputs"],) if parts.inputs else ()
        self._update: Factor = (shared["update"], *own("update", 0.4 * of_terms))
        if shallow:
            self._update += own("depth:update", _DEPTH_OF_UPDATE)
        # Errors of the formula: a factor per stage and per engine, and one that changes with the micro-batch, mostly
        # because of kernels, which are the same for all engines.
        self._whole: Factor = (
            (f"all:{rung.stage}", 0.1 * of_whole),
            *own("all", 0.1 * of_whole),
            ("batch", 0.03 * math.log2(candidate.micro_batch)),
            (f"batch:{family}", 0.015 * of_kernels * math.log2(candidate.micro_batch)),
        )
        self._whole += tuple((each.name, each.time_doubt) for each in candidate.engine.techniques if each.time_doubt)
        if shallow:
            self._whole += own("depth", _DEPTH)
        self.names = names_of(
            self._compute,
            self._ramp,
            self._launch,
            self._reduce,
            self._handling,
            self._gather,
            self._exchange,
            self._inputs,
            self._update,
            self._whole,
        )

    def without(self, parts: Sequence[str]) -> _Steps:
        """The same steps if these parts took no time."""
        shorter = copy(self)
        shorter._parts = replace(self._parts, **dict.fromkeys(parts, 0.0))
        return shorter

    def seconds(self, unknowns: Unknowns) -> tuple[float, float]:
        """Seconds of a micro-step without and with the optimizer."""
        parts, whole = self._parts, scale(self._whole, unknowns)
        beside = parts.exchange * scale(self._exchange, unknowns) + parts.inputs * scale(self._inputs, unknowns)
        micro = whole * micro_step(
            compute=(parts.compute + parts.ramp * scale(self._ramp, unknowns)) * scale(self._compute, unknowns),
            reduce=parts.reduce * scale(self._reduce, unknowns),
            hidden=parts.hidden,
            beside=beside + parts.handling * scale(self._handling, unknowns),
            gather=parts.gather * scale(self._gather, unknowns),
            launch=parts.launch * scale(self._launch, unknowns),
        )
        return micro, micro + whole * parts.update * scale(self._update, unknowns)

    def log_seconds(self, accumulation: int, unknowns: Unknowns) -> float:
        """The logarithm of the seconds of a step of `accumulation` micro-steps; 0: of one without the optimizer."""
        micro, boundary = self.seconds(unknowns)
        return math.log(micro if accumulation == 0 else (accumulation - 1) * micro + boundary)

    def datum(self, accumulation: int, seconds: float, noise: float) -> Datum:
        """A measured time as data for the fit; `accumulation` as in `log_seconds`."""
        return Datum(
            formula=lambda unknowns: self.log_seconds(accumulation, unknowns),
            names=self.names,
            target=math.log(seconds),
            noise=noise,
        )


def _shared_name(term: str, rung: Rung) -> str:
    """The shared unknown of `term`: reductions differ by stage, and updates by where the optimizer is."""
    return {"reduce": f"reduce:{rung.stage}", "update": f"update:{rung.offload_optimizer}"}.get(term, term)


def lessons(
    calibration: SpeedCalibration, rungs: Iterable[Rung], before: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """What measurements of engines on `rungs` say of the machine, for tunes of other models on it.

    By unknown: mean and standard deviation in units of its prior. `before` is what earlier tunes had said, from which
    `calibration` began.
    """
    fit, found = calibration.fit, {}
    shares = _shares(calibration.data)
    for name in dict.fromkeys(_shared_name(term, rung) for rung in rungs for term in _SHARED):
        if name not in fit.covariance or shares.get(name, 0.0) < _MATTERS:
            continue
        mean, deviation = before.get(name, (0.0, 1.0))
        left = max(0.0, fit.covariance[name][name])
        # A surprised fit says that measurements are as much less precise as it is surprised, so they teach less.
        doubted = 1 - left + fit.surprise**2 * left
        value, spread = fit.values[name] / doubted, fit.surprise * math.sqrt(left / doubted)
        found[name] = (mean + deviation * value, max(_LEAST_LEFT, deviation * spread))
    return found


def _doubted(rung: Rung, machine: MachineSpeed) -> tuple[float, float, float]:
    """The factors of `_RECORDED`; 1 on machines that are known less well."""
    if not machine.is_recorded:
        return 1.0, 1.0, 1.0
    return _RECORDED if is_main(rung) else _RECORDED_ELSEWHERE


def _hooks(candidate: Candidate, of_terms: float) -> Factor:
    """The unknown error of hooks, which the host works through beside launching kernels."""
    rung = candidate.engine.rung
    if not is_main(rung):
        return ((f"launch:{kin_of(rung)}", _LAUNCH_ELSEWHERE),)
    if rung.stage < 3:
        return ()
    return (("launch:hooks", _LAUNCH_OF_STAGE_3), *_own(candidate, "launch:hooks", 0.3 * of_terms))


def _shares(data: Sequence[Datum]) -> dict[str, float]:
    """By shared unknown: the largest share of a measured time that its term has, as predicted before any trial."""
    found: dict[str, float] = {}
    for datum in data:
        for name, slope in Fit().estimate(datum.formula, datum.names).slopes.items():
            sigma = _SHARED.get(name.partition(":")[0])
            if sigma is not None:
                found[name] = max(found.get(name, 0.0), slope / sigma)
    return found


def _own(candidate: Candidate, term: str, sigma: float) -> Factor:
    """The unknown error of `term` for one engine: mostly shared with its family of rungs, the rest its own.

    Measured: for the update of the same parameters on the host, with and without lean knobs, it was 0.49 and 0.46.
    """
    return (
        (f"{term}:{family_of(candidate.engine.rung)}", 0.8 * sigma),
        (f"{term}:{candidate.engine.states}", 0.6 * sigma),
    )


def _by_kind(checkpointed: float, term: str, sigma: float) -> Factor:
    """The unknown error of `term` with or without checkpointing; with half of it, a mixture and an error of its own."""
    parts = {"ckpt": checkpointed, "whole": 1 - checkpointed}
    factor = tuple((f"{term}:{kind}", share * sigma) for kind, share in parts.items() if share)
    return factor if len(factor) == 1 else (*factor, (f"{term}:half", 0.4 * sigma))


def predict_speed(
    workload: Workload,
    candidate: Candidate,
    *,
    world_size: int,
    machine: MachineSpeed,
    calibration: SpeedCalibration | None = None,
    shallow: bool = False,
) -> SpeedPrediction:
    """The step times of `candidate` on `world_size` ranks of one node.

    With `shallow`, `workload` has only a few layers, and the uncertainty for depth is added.
    """
    known = (calibration or SpeedCalibration()).fit
    steps = _Steps(workload, candidate, world_size, machine, shallow)
    micro, boundary = steps.seconds(known.values)
    step = (candidate.accumulation - 1) * micro + boundary
    estimate = known.estimate(lambda z: steps.log_seconds(candidate.accumulation, z), steps.names)
    tokens = workload.tokens_per_step
    return SpeedPrediction(
        accumulate_seconds=micro,
        boundary_seconds=boundary,
        tokens_per_second=tokens / step,
        estimate=estimate,
        fit=known,
    )


def micro_step_seconds(
    workload: Workload,
    candidate: Candidate,
    *,
    world_size: int,
    machine: MachineSpeed,
    calibration: SpeedCalibration,
    without: Sequence[str] = (),
) -> float:
    """Seconds of a micro-step without the optimizer, if the parts named in `without` took no time."""
    steps = _Steps(workload, candidate, world_size, machine)
    return steps.without(without).seconds(calibration.fit.values)[0]


def calibrate_speed(
    workload: Workload, observations: Sequence[SpeedObservation], *, world_size: int, machine: MachineSpeed
) -> SpeedCalibration:
    """What follows from `observations` for this workload on this machine; useful from the first one on."""
    data = []
    for seen in observations:
        steps = _Steps(seen.shallow or workload, seen.candidate, world_size, machine, seen.shallow is not None)
        data.append(steps.datum(1, seen.boundary_seconds, seen.noise))
        if seen.accumulate_seconds is not None:
            data.append(steps.datum(0, seen.accumulate_seconds, seen.noise))
    return SpeedCalibration(fit=fit(data), data=tuple(data))
