"""How long a step of a candidate takes, before it is tried, and corrected by what trials measured.

A micro-step is compute, in proportion to the micro-batch, beside or after communication, which does not depend on it;
the optimizer step comes on top at the boundary. Each term is a quantity over a speed (operations over FLOP/s, bytes
over bytes/s), so that a machine never measured has a prior; `calibrate_speed` learns the factors. The constants called
"measured" are fits to tests/data: a Llama-2-7B shape on four H200.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from ladder.backends.registry import backend_of
from ladder.candidates import Candidate
from ladder.machine.machine_speed import MachineSpeed
from ladder.search.calibration import Datum, Estimate, Factor, Fit, Unknowns, fit, names_of, scale
from ladder.workload.workload import Workload

_QUANTILE_95 = 1.645
"""Derived: the 95 % quantile of a normal distribution, so that 90 % lie between both ends."""
STEP_NOISE = 0.015
"""Relative: the step times of one candidate from trial to trial, and what the formula's shape misses. Chosen: a little
more than the 1 % to which a median is timed (`StepPolicy.target_spread`)."""
_DEPTH = 0.07
"""How far an engine strays with a few layers from how far it strays with all. Measured at micro-batches of 4 and 8:
4 to 10 % from 4 layers to 32 of Llama-2-7B, with offload. What one family's probe hid tells nothing of another's."""
_DEPTH_OF_UPDATE = 0.17
"""As `_DEPTH`, of the optimizer alone. Measured: up to 20 % of a step without accumulation."""


@dataclass(frozen=True, kw_only=True)
class SpeedPrediction:
    """The time of a candidate's steps and how far it is to be believed."""

    accumulate_seconds: float
    """A micro-step without the optimizer."""
    boundary_seconds: float
    """A micro-step with the optimizer."""
    tokens_per_second: float
    """Of all ranks together, at the candidate's own accumulation."""
    estimate: Estimate
    """The logarithm of the optimizer step's seconds, to be compared with another candidate's."""
    fit: Fit = field(repr=False)
    """What it was predicted with."""

    @cached_property
    def deviation(self) -> float:
        """Of `estimate`; worked out when it is first asked for, since it takes the whole covariance."""
        return self.fit.deviation(self.estimate)

    @property
    def low(self) -> float:
        """Step time is with 90 % between `low` and `high` times what is predicted."""
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
    """Of a probe: the workload with the few layers that it had."""
    boundary_seconds: float
    accumulate_seconds: float | None = None
    noise: float = STEP_NOISE
    """Relative: how far these times may be off."""


@dataclass(frozen=True, kw_only=True)
class SpeedCalibration:
    """What measurements have taught; without any, the prior."""

    fit: Fit = field(default_factory=Fit)


class _Steps:
    """The times of a candidate's steps, and what is not known about them: standard deviations of logarithms."""

    def __init__(
        self, workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed, shallow: bool = False
    ) -> None:
        rung, family = candidate.engine.rung, candidate.engine.rung.family
        own, by_kind = partial(_own, candidate), partial(_by_kind, candidate.checkpointed)
        self._terms = backend_of(rung).step_terms(workload, candidate, world_size, machine)
        doubt = machine.doubt
        self._compute: Factor = (("compute", 0.35 * doubt), *by_kind("compute", 0.08), (f"compute:{family}", 0.06))
        self._ramp: Factor = (("ramp", 0.8),)
        self._launch: Factor = (("launch", 0.5 * doubt),)
        reduce: Factor = ((f"reduce:{rung.stage}", 0.4 * doubt), *own("reduce", 0.4))
        self._reduce: Factor = reduce if self._terms.reduce else ()
        gather: Factor = (
            ("gather", 0.4 * doubt),
            *own("gather", 0.3),
            *by_kind("gather", 0.1),
            *by_kind(f"gather:{family}", 0.1),
        )
        self._gather: Factor = gather if self._terms.gather else ()
        self._exchange: Factor = (("exchange", 0.5 * doubt),) if self._terms.exchange else ()
        self._inputs: Factor = (("inputs", 0.4 * doubt),) if self._terms.inputs else ()
        self._update: Factor = ((f"update:{rung.offload_optimizer}", 0.4 * doubt), *own("update", 0.4))
        if shallow:
            self._update += own("depth:update", _DEPTH_OF_UPDATE)
        # What the shape of the formula misses: a factor of the stage's and of the engine's own, and one that drifts
        # with the micro-batch. The drift is mostly the kernels', and those are the same whatever the engine.
        self._whole: Factor = (
            (f"all:{rung.stage}", 0.1),
            *own("all", 0.1),
            ("batch", 0.03 * math.log2(candidate.micro_batch)),
            (f"batch:{family}", 0.015 * math.log2(candidate.micro_batch)),
        )
        self._whole += self._terms.doubts
        if shallow:
            self._whole += own("depth", _DEPTH)
        self.names = names_of(
            self._compute,
            self._ramp,
            self._launch,
            self._reduce,
            self._gather,
            self._exchange,
            self._inputs,
            self._update,
            self._whole,
        )

    def seconds(self, unknowns: Unknowns) -> tuple[float, float]:
        """Seconds of an accumulating and of a boundary micro-step."""
        terms, whole = self._terms, scale(self._whole, unknowns)
        compute = (terms.compute + terms.ramp * scale(self._ramp, unknowns)) * scale(self._compute, unknowns)
        reduce = terms.reduce * scale(self._reduce, unknowns)
        busy = compute + reduce - terms.hidden * min(reduce, compute * 2 / 3)
        busy += terms.exchange * scale(self._exchange, unknowns) + terms.inputs * scale(self._inputs, unknowns)
        gather, launch = terms.gather * scale(self._gather, unknowns), terms.launch * scale(self._launch, unknowns)
        micro = whole * _soft_maximum(busy, gather, launch)
        return micro, micro + whole * terms.update * scale(self._update, unknowns)

    def log_seconds(self, accumulation: int, unknowns: Unknowns) -> float:
        """Logarithm of an optimizer step of `accumulation` micro-steps; 0 stands for one accumulating micro-step."""
        micro, boundary = self.seconds(unknowns)
        return math.log(micro if accumulation == 0 else (accumulation - 1) * micro + boundary)

    def datum(self, accumulation: int, seconds: float, noise: float) -> Datum:
        """A measured time for the fit; `accumulation` as in `log_seconds`."""
        return Datum(
            formula=lambda unknowns: self.log_seconds(accumulation, unknowns),
            names=self.names,
            target=math.log(seconds),
            noise=noise,
        )


def _own(candidate: Candidate, term: str, sigma: float) -> Factor:
    """What one engine's `term` strays by: mostly with its family, the rest on its own.

    Measured: the same parameters updated on the host, with and without the lean knobs, strayed by 0.49 and 0.46.
    """
    return ((f"{term}:{candidate.engine.rung.family}", 0.8 * sigma), (f"{term}:{candidate.engine.states}", 0.6 * sigma))


def _by_kind(checkpointed: float, term: str, sigma: float) -> Factor:
    """What a `term` strays by with checkpointing or without; with half of it, by as much of both, and a little more."""
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

    With `shallow`, `workload` has a few layers only, and what the step from them to the whole model hides is in doubt.
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


def calibrate_speed(
    workload: Workload, observations: Sequence[SpeedObservation], *, world_size: int, machine: MachineSpeed
) -> SpeedCalibration:
    """What `observations` teach about this workload on this machine; useful from the first one on."""
    data = []
    for seen in observations:
        steps = _Steps(seen.shallow or workload, seen.candidate, world_size, machine, seen.shallow is not None)
        data.append(steps.datum(1, seen.boundary_seconds, seen.noise))
        if seen.accumulate_seconds is not None:
            data.append(steps.datum(0, seen.accumulate_seconds, seen.noise))
    return SpeedCalibration(fit=fit(data))


def _soft_maximum(*seconds: float) -> float:
    """The longest, and a little more where others are nearly as long: overlap is never perfect."""
    longest = max(seconds)
    return longest * math.sqrt(math.sqrt(math.fsum((value / longest) ** 4 for value in seconds)))
