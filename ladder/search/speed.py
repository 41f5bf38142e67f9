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

from ladder.backends.activations import offloaded_input, tokens_of_a_rank
from ladder.backends.deepspeed.config import engine_knobs
from ladder.candidates import ADAM_8BIT, BF16_STATES, Candidate
from ladder.search.calibration import Datum, Estimate, Factor, Fit, Unknowns, fit, names_of, scale
from ladder.search.machine_speed import MachineSpeed, flops_per_token
from ladder.workload.workload import Workload

_QUANTILE_95 = 1.645  # two-sided: 90 %
STEP_NOISE = 0.015
"""Relative: the step times of one candidate from trial to trial, and what the formula's shape misses."""
_DEPTH = 0.07
"""How far an engine strays with a few layers from how far it strays with all. Measured at micro-batches of 4 and 8:
4 to 10 % from 4 layers to 32 of Llama-2-7B, with offload. What one family's probe hid tells nothing of another's."""
_DEPTH_OF_UPDATE = 0.17
"""Likewise the optimizer alone: up to 20 % of a step without accumulation."""
_RAMP_TOKENS = 200.0
"""Tokens whose compute the start and the end of kernels cost, on a GPU of 1e15 operations a second (estimate)."""
_LIGER, _LIGER_DOUBT = 0.97, 0.05
"""Compute with Liger's kernels, relative: less traffic to memory, a loss in pieces (estimate)."""
_LAUNCH_SECONDS = 0.003
"""A block's kernels, forward and backward, started one by one from Python. Measured 0.0044 to 0.0051 where 16 cores of
a shared host feed an H200; a host of one's own is up to three times as fast (estimate)."""


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


@dataclass(frozen=True)
class _Terms:
    """Seconds of a candidate's parts by the machine's prior, before any correction."""

    compute: float
    ramp: float
    """What compute takes more because kernels of a finite batch do not fill the GPU: the same for any micro-batch."""
    launch: float
    """Host work to start the kernels: the least a micro-step takes, however small its batch."""
    reduce: float
    """Reduction of gradients, and their way to the host, in every micro-step."""
    gather: float
    """Stage 3's parameters: the transfers, or the host's work for them where that takes longer."""
    exchange: float
    """Heads of attention between ranks that share a sequence."""
    inputs: float
    """Of layers, on their way to the host in forward and back in backward: the kernels wait for them."""
    hidden: float
    """The share of `reduce` that runs beside backward."""
    update: float
    """All that only the boundary does: the optimizer, reduction at stages 0 and 1, parameters on their way back."""


class _Steps:
    """The times of a candidate's steps, and what is not known about them: standard deviations of logarithms."""

    def __init__(
        self, workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed, shallow: bool = False
    ) -> None:
        rung, family = candidate.engine.rung, candidate.engine.rung.family
        own, by_kind = partial(_own, candidate), partial(_by_kind, candidate.checkpointed)
        self._terms = _terms(workload, candidate, world_size, machine)
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
        if candidate.engine.liger:
            self._whole += (("liger", _LIGER_DOUBT),)
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
    tokens = candidate.sequences(world_size) * workload.seq_len
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


def _terms(workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed) -> _Terms:
    """What the steps of `candidate` consist of, with P parameters and N ranks.

    Compute: `flops_per_token`, 4/3 of it in the layers with checkpointing, which run forward twice. A collective over N
    ranks moves (N − 1)/N of its bytes over each link, an all-reduce twice that. Stage 2 all-reduces its buckets in
    every micro-step, stages 0 and 1 at the boundary; stage 3 gathers in forward and in backward, and scatters
    gradients. Offload of the optimizer takes 2 P/N bytes of gradients down, at stage 2 in every micro-step and up
    again, at stage 1 at the boundary; offload of parameters brings 2 P/N up for each gathering, but for those that
    stay live. Ranks that share a sequence exchange queries, keys, values and what attention makes of them in each pass.
    """
    model, rung = workload.model, candidate.engine.rung
    p, share = model.num_parameters, model.num_parameters / world_size
    tokens = tokens_of_a_rank(workload, candidate, world_size)
    knobs = engine_knobs(workload, candidate.engine)
    again = 1 + candidate.checkpointed / 3
    computing = flops_per_token(workload) * again
    transfer = 2.0 * p * (world_size - 1) / world_size / machine.link_bytes
    reduce = once = gather = 0.0
    if rung.stage < 2:
        once = 2 * transfer
    if rung.stage == 2:
        reduce = 2 * transfer
    if rung.stage in (1, 2):
        once += transfer
    if rung.stage < 3 and rung.offload_optimizer != "none":
        down = 2 * share / machine.pcie_bytes
        reduce, once = (reduce, once + down) if rung.stage == 1 else (reduce + 2 * down, once)
    if rung.stage == 3:
        reduce = 2 * transfer
        # With checkpointing, the second forward pass gathers again what has not stayed live.
        transfers, hooks = 2.0 + 0.5 * candidate.checkpointed, 0.8 + 0.2 * candidate.checkpointed
        gather = max(transfers * transfer, hooks * machine.host_seconds * model.num_layers)
    if rung.offload_param != "none":
        bus = machine.pcie_bytes if rung.offload_param == "cpu" else machine.nvme_bytes / world_size
        gather += 2 * 2 * share * max(0.0, 1 - knobs["stage3_max_live_parameters"] / p) / bus
    exchange = 0.0
    if candidate.engine.ulysses:
        heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
        passes = 2.0 + candidate.checkpointed
        exchange = passes * model.num_layers * tokens * 2.0 * heads * (world_size - 1) / world_size / machine.link_bytes
    token_seconds = computing / (machine.flops * machine.achievable) * (_LIGER if candidate.engine.liger else 1.0)
    return _Terms(
        compute=tokens * token_seconds,
        ramp=_RAMP_TOKENS * machine.flops / 1e15 * token_seconds,
        launch=_LAUNCH_SECONDS * model.num_layers * again,
        reduce=reduce,
        gather=gather,
        exchange=exchange,
        inputs=2 * model.num_layers * offloaded_input(workload, candidate, world_size) / machine.pcie_bytes,
        hidden=(0.7 if rung.stage < 3 else 0.4) if knobs.get("overlap_comm") else 0.0,
        update=once + _update_seconds(candidate, share, world_size, machine),
    )


def _update_seconds(candidate: Candidate, share: float, world_size: int, machine: MachineSpeed) -> float:
    """Seconds of the optimizer, and of moving what it updated to where the parameters live.

    On the GPU it reads and writes 60 bytes a parameter (derived: states, master, gradients in both widths, norm), half
    of that with states in bf16, 48 with moments in 8 bits. NVMe moves 30 bytes a parameter (derived: states, master and
    gradients read, states and master written). Measured: where parameters alone are offloaded, their update reaches the
    host at a fiftieth of the bus's speed.
    """
    rung, back = candidate.engine.rung, 2 * share / machine.pcie_bytes
    if rung.offload_optimizer == "none":
        owned = share if rung.stage > 0 else share * world_size
        width = {BF16_STATES: 30, ADAM_8BIT: 48}.get(candidate.engine.numerics, 60)
        return width * owned / machine.device_bytes + (50 * back if rung.offload_param == "cpu" else 0.0)
    if rung.offload_optimizer == "cpu":
        return share * world_size / machine.cpu_adam_parameters + back
    return 30 * share * world_size / machine.nvme_bytes + back
