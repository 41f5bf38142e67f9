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

from ladder.candidates import Candidate, engine_knobs
from ladder.search.calibration import Datum, Factor, Fit, Unknowns, fit, names_of, scale
from ladder.workload import Workload

_QUANTILE_95 = 1.645  # two-sided: 90 %
_NOISE = 0.015
"""Relative: the step times of one candidate from trial to trial, and what the formula's shape misses."""
_LAUNCH_SECONDS = 0.0015
"""A block's kernels, forward and backward, started one by one from Python (estimate)."""


@dataclass(frozen=True, kw_only=True)
class MachineSpeed:
    """What one node does a second: of one GPU where not said otherwise."""

    flops: float
    """Dense 16-bit floating-point operations, as the vendor states them."""
    achievable: float
    """The share of `flops` that transformer blocks reach at a large micro-batch."""
    device_bytes: float
    """Bytes of the GPU's own memory."""
    link_bytes: float
    """Bytes between GPUs, of a collective's bus."""
    pcie_bytes: float
    """Bytes between a GPU and the host, pinned."""
    cpu_adam_parameters: float
    """Parameters that CPU Adam updates, on all cores together."""
    nvme_bytes: float
    """Bytes to and from the disk, for all ranks together."""
    host_seconds: float = 0.014
    """Host work for one block's gathering hooks at stage 3; measured 13 to 16 ms, whatever the micro-batch."""


# Dense bf16 FLOP/s (fp16 where there is no bf16), memory bytes/s and NVLink or PCIe bytes/s between GPUs: data sheets.
_GPUS: tuple[tuple[str, float, float, float], ...] = (
    ("B200", 2250e12, 8.0e12, 500e9),
    ("GH200", 989e12, 4.0e12, 250e9),
    ("H200", 989e12, 4.8e12, 250e9),
    ("H100 PCIe", 756e12, 2.0e12, 50e9),
    ("H100 NVL", 835e12, 3.9e12, 200e9),
    ("H100", 989e12, 3.35e12, 250e9),
    ("A100-PCIE", 312e12, 1.6e12, 20e9),
    ("A100", 312e12, 2.0e12, 230e9),
    ("L40S", 362e12, 0.86e12, 20e9),
    ("L40", 181e12, 0.86e12, 20e9),
    ("L4", 121e12, 0.3e12, 15e9),
    ("A10G", 70e12, 0.6e12, 12e9),
    ("A10", 125e12, 0.6e12, 20e9),
    ("V100-PCIE", 112e12, 0.9e12, 10e9),
    ("V100", 125e12, 0.9e12, 120e9),
    ("T4", 65e12, 0.32e12, 8e9),
    ("RTX 4090", 165e12, 1.0e12, 15e9),
    ("RTX 3090", 71e12, 0.94e12, 12e9),
)
_UNKNOWN_GPU = (150e12, 1.0e12, 20e9)


def machine_speed(gpu_name: str | None, device: str, world_size: int, cores: int) -> MachineSpeed:
    """The prior for `world_size` GPUs of this name (None: unknown) in a node of `cores`, or for ranks on a CPU.

    A core is believed to update 47 million parameters a second with CPU Adam (measured: 64 cores, 3.0e9), and on a CPU
    to reach 20 GFLOP/s in bf16.
    """
    cores = max(1, cores)
    if device == "cpu":
        share = cores / max(1, world_size)
        return MachineSpeed(
            flops=40e9 * share,
            achievable=0.5,
            device_bytes=5e9 * share,
            link_bytes=1e9,
            pcie_bytes=5e9,
            cpu_adam_parameters=47e6 * cores,
            nvme_bytes=1e9,
            host_seconds=0.010,
        )
    flops, memory, link = _gpu(gpu_name) or _UNKNOWN_GPU
    return MachineSpeed(
        flops=flops,
        achievable=0.55,
        device_bytes=memory,
        link_bytes=link,
        pcie_bytes=40e9 if memory > 3e12 else 20e9 if memory > 0.5e12 else 10e9,
        cpu_adam_parameters=47e6 * cores,
        nvme_bytes=3e9,
    )


def peak_flops(gpu_name: str | None) -> float | None:
    """Dense 16-bit FLOP/s of a GPU by its name as the driver gives it; None for one that is not listed."""
    known = _gpu(gpu_name)
    return None if known is None else known[0]


def _gpu(gpu_name: str | None) -> tuple[float, float, float] | None:
    """The first entry of which every word is among the words of `gpu_name`: "NVIDIA A100-SXM4-80GB" is an "A100"."""
    if gpu_name is None:
        return None
    text = f" {gpu_name.upper()} ".replace("-", " ").replace("_", " ")
    for name, *figures in _GPUS:
        if all(f" {word} " in text for word in name.upper().replace("-", " ").split()):
            flops, memory, link = figures
            return flops, memory, link
    return None


def flops_per_token(workload: Workload) -> float:
    """Floating-point operations of forward and backward for a token: 6 N, and 6·L·h·s of causal attention."""
    model = workload.model
    return 6.0 * model.num_matmul_parameters + 6.0 * model.num_layers * model.hidden_size * workload.seq_len


def mfu(workload: Workload, tokens_per_second: float, world_size: int, gpu_name: str | None) -> float | None:
    """Model FLOP/s utilisation, 0 to 1, of all GPUs; what checkpointing computes again does not count."""
    peak = peak_flops(gpu_name)
    return None if peak is None else flops_per_token(workload) * tokens_per_second / (peak * world_size)


@dataclass(frozen=True, kw_only=True)
class SpeedPrediction:
    """The time of a candidate's steps and how far it is to be believed."""

    accumulate_seconds: float
    """A micro-step without the optimizer."""
    boundary_seconds: float
    """A micro-step with the optimizer."""
    low: float
    """Step time is with 90 % between `low` and `high` times what is predicted."""
    high: float
    tokens_per_second: float
    """Of all ranks together, at the candidate's own accumulation."""

    def step_seconds(self, accumulation: int) -> float:
        """Seconds of one optimizer step of `accumulation` micro-steps."""
        return (accumulation - 1) * self.accumulate_seconds + self.boundary_seconds


@dataclass(frozen=True, kw_only=True)
class SpeedObservation:
    """What a trial measured of one candidate."""

    candidate: Candidate
    boundary_seconds: float
    accumulate_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class SpeedCalibration:
    """What measurements have taught; without any, the prior."""

    fit: Fit = field(default_factory=Fit)


@dataclass(frozen=True)
class _Terms:
    """Seconds of a candidate's parts by the machine's prior, before any correction."""

    compute: float
    launch: float
    """Host work to start the kernels: the least a micro-step takes, however small its batch."""
    reduce: float
    """Reduction of gradients, and their way to the host, in every micro-step."""
    gather: float
    """Stage 3's parameters: the transfers, or the host's work for them where that takes longer."""
    hidden: float
    """The share of `reduce` that runs beside backward."""
    update: float
    """All that only the boundary does: the optimizer, reduction at stages 0 and 1, parameters on their way back."""


class _Steps:
    """The times of a candidate's steps, and what is not known about them: standard deviations of logarithms."""

    def __init__(self, workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed) -> None:
        rung, key = candidate.engine.rung, candidate.engine.key
        kind = "ckpt" if candidate.gradient_checkpointing else "whole"
        self._terms = _terms(workload, candidate, world_size, machine)
        self._compute: Factor = (("compute", 0.35), (f"compute:{kind}", 0.08), (f"compute:{key}", 0.06))
        self._launch: Factor = (("launch", 0.4),)
        self._reduce: Factor = ((f"reduce:{rung.stage}", 0.4), (f"reduce:{key}", 0.4)) if self._terms.reduce else ()
        gather: Factor = (("gather", 0.4), (f"gather:{key}", 0.3), (f"gather:{key}:{kind}", 0.1))
        self._gather: Factor = gather if self._terms.gather else ()
        self._update: Factor = ((f"update:{rung.offload_optimizer}", 0.4), (f"update:{key}", 0.4))
        # What the shape of the formula misses: a factor of the engine's own, and one that drifts with the micro-batch.
        self._whole: Factor = ((f"all:{key}", 0.15), (f"batch:{key}", 0.03 * math.log2(candidate.micro_batch)))
        self.names = names_of(self._compute, self._launch, self._reduce, self._gather, self._update, self._whole)

    def seconds(self, unknowns: Unknowns) -> tuple[float, float]:
        """Seconds of an accumulating and of a boundary micro-step."""
        terms, whole = self._terms, scale(self._whole, unknowns)
        compute, reduce = terms.compute * scale(self._compute, unknowns), terms.reduce * scale(self._reduce, unknowns)
        busy = compute + reduce - terms.hidden * min(reduce, compute * 2 / 3)
        gather, launch = terms.gather * scale(self._gather, unknowns), terms.launch * scale(self._launch, unknowns)
        micro = whole * _soft_maximum(busy, gather, launch)
        return micro, micro + whole * terms.update * scale(self._update, unknowns)

    def log_seconds(self, accumulation: int, unknowns: Unknowns) -> float:
        """Logarithm of an optimizer step of `accumulation` micro-steps; 0 stands for one accumulating micro-step."""
        micro, boundary = self.seconds(unknowns)
        return math.log(micro if accumulation == 0 else (accumulation - 1) * micro + boundary)

    def datum(self, accumulation: int, seconds: float) -> Datum:
        """A measured time for the fit; `accumulation` as in `log_seconds`."""
        return Datum(
            formula=lambda unknowns: self.log_seconds(accumulation, unknowns),
            names=self.names,
            target=math.log(seconds),
            noise=_NOISE,
        )


def predict_speed(
    workload: Workload,
    candidate: Candidate,
    *,
    world_size: int,
    machine: MachineSpeed,
    calibration: SpeedCalibration | None = None,
) -> SpeedPrediction:
    """The step times of `candidate` on `world_size` ranks of one node."""
    known = (calibration or SpeedCalibration()).fit
    steps = _Steps(workload, candidate, world_size, machine)
    micro, boundary = steps.seconds(known.values)
    step = (candidate.accumulation - 1) * micro + boundary
    _, deviation = known.predict(lambda z: steps.log_seconds(candidate.accumulation, z), steps.names)
    factor = math.exp(_QUANTILE_95 * math.hypot(deviation, _NOISE))
    tokens = candidate.micro_batch * candidate.accumulation * world_size * workload.seq_len
    return SpeedPrediction(
        accumulate_seconds=micro,
        boundary_seconds=boundary,
        low=1 / factor,
        high=factor,
        tokens_per_second=tokens / step,
    )


def calibrate_speed(
    workload: Workload, observations: Sequence[SpeedObservation], *, world_size: int, machine: MachineSpeed
) -> SpeedCalibration:
    """What `observations` teach about this workload on this machine; useful from the first one on."""
    data = []
    for seen in observations:
        steps = _Steps(workload, seen.candidate, world_size, machine)
        data.append(steps.datum(1, seen.boundary_seconds))
        if seen.accumulate_seconds is not None:
            data.append(steps.datum(0, seen.accumulate_seconds))
    return SpeedCalibration(fit=fit(data))


def _soft_maximum(*seconds: float) -> float:
    """The longest, and a little more where others are nearly as long: overlap is never perfect."""
    longest = max(seconds)
    return longest * math.sqrt(math.sqrt(math.fsum((value / longest) ** 4 for value in seconds)))


def _terms(workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed) -> _Terms:
    """What the steps of `candidate` consist of, with P parameters and N ranks.

    Compute: `flops_per_token`, 4/3 of it with checkpointing, which runs forward twice. A collective over N ranks moves
    (N − 1)/N of its bytes over each link, an all-reduce twice that. Stage 2 all-reduces its buckets in every
    micro-step, stages 0 and 1 at the boundary; stage 3 gathers in forward and in backward, and scatters gradients.
    Offload of the optimizer takes 2 P/N bytes of gradients down and up again; offload of parameters brings 2 P/N up
    for each gathering, but for those that stay live.
    """
    model, rung = workload.model, candidate.engine.rung
    p, share, tokens = model.num_parameters, model.num_parameters / world_size, candidate.micro_batch * workload.seq_len
    knobs = engine_knobs(workload, candidate.engine)
    computing = flops_per_token(workload) * (4 / 3 if candidate.gradient_checkpointing else 1.0)
    transfer = 2.0 * p * (world_size - 1) / world_size / machine.link_bytes
    reduce = once = gather = 0.0
    if rung.stage < 2:
        once = 2 * transfer
    if rung.stage == 2:
        reduce = 2 * transfer
    if rung.stage in (1, 2):
        once += transfer
    if rung.stage < 3 and rung.offload_optimizer != "none":
        reduce += 4 * share / machine.pcie_bytes
    if rung.stage == 3:
        reduce = 2 * transfer
        passes = 1.0 if candidate.gradient_checkpointing else 0.8
        gather = max(2 * transfer, passes * machine.host_seconds * model.num_layers)
    if rung.offload_param != "none":
        bus = machine.pcie_bytes if rung.offload_param == "cpu" else machine.nvme_bytes / world_size
        gather += 2 * 2 * share * max(0.0, 1 - knobs["stage3_max_live_parameters"] / p) / bus
    return _Terms(
        compute=tokens * computing / (machine.flops * machine.achievable),
        launch=_LAUNCH_SECONDS * model.num_layers * (4 / 3 if candidate.gradient_checkpointing else 1.0),
        reduce=reduce,
        gather=gather,
        hidden=0.7 if knobs.get("overlap_comm") and rung.stage < 3 else 0.0,
        update=once + _update_seconds(workload, candidate, share, world_size, machine),
    )


def _update_seconds(
    workload: Workload, candidate: Candidate, share: float, world_size: int, machine: MachineSpeed
) -> float:
    """Seconds of the optimizer, and of moving what it updated to where the parameters live.

    On the GPU it reads and writes 60 bytes a parameter (derived: states, master, gradients in both widths, norm). NVMe
    moves 30 bytes a parameter (derived: states, master and gradients read, states and master written). Measured: where
    parameters alone are offloaded, their update reaches the host at a fiftieth of the bus's speed.
    """
    rung, back = candidate.engine.rung, 2 * share / machine.pcie_bytes
    if rung.offload_optimizer == "none":
        owned = share if rung.stage > 0 else share * world_size
        return 60 * owned / machine.device_bytes + (50 * back if rung.offload_param == "cpu" else 0.0)
    if rung.offload_optimizer == "cpu":
        return share * world_size / machine.cpu_adam_parameters + back
    return 30 * share * world_size / machine.nvme_bytes + back
