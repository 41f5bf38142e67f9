"""The speeds of a machine: vendors' figures by GPU name, as the prior before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ladder.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class MachineSpeed:
    """The speeds of the nodes, per second and per GPU if not said otherwise."""

    flops: float
    """Dense 16-bit floating-point operations, as the vendor states them."""
    achievable: float
    """The share of `flops` that the matrix products of training reach with a large micro-batch."""
    flops_32: float
    """Operations of products in 32 bits, as PyTorch computes them unless told otherwise."""
    device_bytes: float
    """Memory bandwidth of the GPU."""
    link_bytes: float
    """Bus bandwidth of collectives between all GPUs: of the network if there are several nodes."""
    node_link_bytes: float
    """The same between the GPUs of a node."""
    pcie_bytes: float
    """Bandwidth between GPU and pinned host memory."""
    cpu_adam_parameters: float
    """Parameters that CPU Adam updates on all cores together."""
    nvme_bytes: float
    """Bandwidth of the drive, for all ranks together."""
    host_seconds: float = 0.013
    """Stage 3's work for a block on the host, besides launching its kernels. Measured: 10 to 20 ms, with any
    micro-batch (benchmarks/results/sweeps)."""
    launch_seconds: float = 0.003
    """Launching a block's kernels for forward and backward from Python. Measured: 0.0044 to 0.0051 s with 16 cores of a
    shared host for an H200. Chosen: a dedicated host is up to three times as fast."""
    doubt: float = 1.0
    """A factor on the standard deviations that all engines share: above 1 if less is known than about a listed GPU."""
    of_formula: float = 1.0
    """The part of `doubt` that no measurement of the machine lessens, because it is the formulas'."""
    is_recorded: bool = False
    """Whether whole sweeps were recorded on such machines, so that the differences between engines are known better."""
    beliefs: Mapping[str, KnownRate] = field(default_factory=dict)
    """By unknown of the speed model: what is known of it beside the data sheets."""

    def belief(self, unknown: str, sigma: float) -> tuple[float, float]:
        """Mean and deviation (logarithms) of an unknown; by the data sheet of a listed GPU they are 0 and `sigma`."""
        found = self.beliefs.get(unknown) or self.beliefs.get(unknown.partition(":")[0])
        usual = sigma * self.doubt
        if found is None:
            return 0.0, usual
        deviation = usual
        if found.share < 1:
            deviation = math.hypot(found.share * sigma * self.of_formula, found.disagreement / 2)
        return found.mean * deviation, found.deviation * deviation


@dataclass(frozen=True, kw_only=True)
class KnownRate:
    """What is known of one unknown beside the data sheets."""

    share: float = 1.0
    """Of the data sheets' standard deviation, what remains after a measurement."""
    disagreement: float = 0.0
    """The logarithm of the measurement over the data sheet: a measurement that is far off is doubted."""
    mean: float = 0.0
    """What tunes taught: the unknown's most probable value, in standard deviations."""
    deviation: float = 1.0
    """And what remains of its standard deviation."""


# Dense bf16 FLOP/s (fp16 where there is no bf16), FLOP/s in 32 bits without TF32, memory bytes/s and NVLink or PCIe
# bytes/s between GPUs: data sheets.
_GPUS: tuple[tuple[str, float, float, float, float], ...] = (
    ("B200", 2250e12, 80e12, 8.0e12, 500e9),
    ("GH200", 989e12, 67e12, 4.0e12, 250e9),
    ("H200", 989e12, 67e12, 4.8e12, 250e9),
    ("H100 PCIe", 756e12, 51e12, 2.0e12, 50e9),
    ("H100 NVL", 835e12, 60e12, 3.9e12, 200e9),
    ("H100", 989e12, 67e12, 3.35e12, 250e9),
    ("A100-PCIE", 312e12, 19.5e12, 1.6e12, 20e9),
    ("A100", 312e12, 19.5e12, 2.0e12, 230e9),
    ("L40S", 362e12, 91.6e12, 0.86e12, 20e9),
    ("L40", 181e12, 90.5e12, 0.86e12, 20e9),
    ("L4", 121e12, 30e12, 0.3e12, 15e9),
    ("A10G", 70e12, 35e12, 0.6e12, 12e9),
    ("A10", 125e12, 31e12, 0.6e12, 20e9),
    ("V100-PCIE", 112e12, 14e12, 0.9e12, 10e9),
    ("V100", 125e12, 15.7e12, 0.9e12, 120e9),
    ("T4", 65e12, 8.1e12, 0.32e12, 8e9),
    ("RTX 4090", 165e12, 82.6e12, 1.0e12, 15e9),
    ("RTX 3090", 71e12, 35.6e12, 0.94e12, 12e9),
)
_RECORDED = ("H200", "H100")
"""Of `_GPUS`, those on one node of which sweeps tell. Chosen: H200, on which they were recorded
(benchmarks/results/sweeps), and H100, which has the same architecture."""
_NETWORK = 25e9
"""Bytes per second and GPU between nodes. Chosen: one port of 200 Gbit/s per GPU."""
_OF_A_CORE, _OF_A_HOST = 130e6, 10e9
"""Parameters per second of CPU Adam: what a core would update alone, and what a host's memory lets all cores update.
Measured: 1.8e9 with 16 cores of hosts with one H100 or H200, 3.2e9 with 32 (benchmarks/results/runs and sweeps), and
3.3e9 to 4.5e9 with 64 cores of a host with four H200."""
_UNKNOWN_GPU = (150e12, 30e12, 1.0e12, 20e9)
"""Figures as in `_GPUS`. Chosen: between an A10 and an RTX 4090; `MachineSpeed.doubt` says how little is known."""


# What remains of the data sheets' doubts once a rate was measured: how far a step's terms still stray from what follows
# from the rate, which is not the machine's but the formula's. Chosen so that predictions on simulated machines whose
# rates are known are as far off as they say (tests/simulated/test_known_machine.py).
_REMAINS = {
    "flops": (("compute", 0.6),),
    "link_bytes": (("reduce:0", 0.6), ("reduce:1", 0.6), ("reduce:2", 0.6), ("reduce:3", 0.6), ("gather", 0.7)),
    "pcie_bytes": (("inputs", 0.6),),
    "device_bytes": (("update:none", 0.6),),
    "cpu_adam_parameters": (("update:cpu", 0.6),),
    "nvme_bytes": (("update:nvme", 0.8),),
}
_OF_PRODUCTS = 0.88
"""What training reaches of the rate at which a machine multiplies matrices alone. Measured: 741 TFLOP/s on an H200, of
which recorded training reaches about 650 (`machine_speed`)."""
_OF_COPIES = 1 / 0.85
"""The data sheet's bandwidth over a plain copy's. Chosen: copies reach 80 to 90 % of it."""
_OF_PINNED = 0.75
"""What offload reaches of a long pinned copy. Chosen: 40 of the 55 GB/s of a 16-lane PCIe 5 link, as without a
measurement."""
_OF_ADAM = 0.67
"""What an optimizer step reaches of Adam alone. Derived: it moves 28 bytes per parameter, and the step 42 with the
norm, the scaling and the 16-bit copy."""


def known_speed(
    speed: MachineSpeed, rates: Mapping[str, float], learned: Mapping[str, tuple[float, float]]
) -> MachineSpeed:
    """`speed` with measured `rates` (`rates.rates_of`) in place of data sheets, and what tunes taught."""
    if not rates and not learned:
        return speed
    ours = {name: rate * FROM_RATES[name] for name, rate in rates.items() if name in FROM_RATES}
    between = ours.pop("network_bytes", None)
    has_network = between is not None or speed.link_bytes < speed.node_link_bytes
    if "link_bytes" in ours:
        ours["node_link_bytes"] = ours["link_bytes"]
        if has_network:  # what was measured in a node says nothing of the network
            ours["link_bytes"] = min(ours["link_bytes"], speed.link_bytes)
    if between is not None:
        ours["link_bytes"] = between
    changes: dict[str, Any] = {name: rate for name, rate in ours.items() if name != "flops"}
    if "flops" in ours:
        changes["achievable"] = ours["flops"] / speed.flops
    new = replace(speed, **changes)
    beliefs: dict[str, KnownRate] = {}
    for name in ours:
        before = speed.flops * speed.achievable if name == "flops" else getattr(speed, name)
        off = abs(math.log(ours[name] / before))
        is_guess = name == "link_bytes" and has_network and between is None
        remains = () if is_guess else _REMAINS.get(name, ())
        beliefs |= {unknown: KnownRate(share=share, disagreement=off) for unknown, share in remains}
    for unknown, (mean, deviation) in learned.items():
        beliefs[unknown] = replace(beliefs.get(unknown, KnownRate()), mean=mean, deviation=deviation)
    return replace(new, beliefs=beliefs)


FROM_RATES = {
    "flops": _OF_PRODUCTS,
    "device_bytes": _OF_COPIES,
    "link_bytes": 1.0,
    "network_bytes": 1.0,
    "pcie_bytes": _OF_PINNED,
    "cpu_adam_parameters": _OF_ADAM,
    "nvme_bytes": 1.0,
}
"""By rate: what it is multiplied with to be a field of `MachineSpeed`; flops become `achievable`. Launching a block is
measured and shown, but not used: how much longer it takes under DeepSpeed's hooks was not measured on the same host."""


def machine_speed(gpu_name: str | None, device: str, world_size: int, cores: int, num_nodes: int = 1) -> MachineSpeed:
    """The prior for `world_size` GPUs of this name (None: unknown) on nodes with `cores` in all, or for CPU ranks.

    It assumes of CPU ranks that a core updates 47 million parameters per second with CPU Adam, and reaches 20 GFLOP/s
    in bf16 (chosen).
    """
    cores = max(1, cores)
    if device == "cpu":
        share = cores / max(1, world_size)
        return MachineSpeed(
            flops=40e9 * share,
            achievable=0.5,
            flops_32=40e9 * share,
            device_bytes=5e9 * share,
            link_bytes=1e9,
            node_link_bytes=1e9,
            pcie_bytes=5e9,
            cpu_adam_parameters=47e6 * cores,
            nvme_bytes=1e9,
            host_seconds=0.010,
            doubt=2.0,
            of_formula=2.0,
        )
    known = _gpu(gpu_name)
    name, flops, flops_32, memory, link = known or ("", *_UNKNOWN_GPU)
    return MachineSpeed(
        flops=flops,
        achievable=0.65,
        flops_32=flops_32,
        device_bytes=memory,
        link_bytes=link if num_nodes == 1 else min(link, _NETWORK),
        node_link_bytes=link,
        pcie_bytes=40e9 if memory > 3e12 else 20e9 if memory > 0.5e12 else 10e9,
        cpu_adam_parameters=1 / (1 / (_OF_A_CORE * cores) + 1 / (_OF_A_HOST * num_nodes)),
        nvme_bytes=3e9 * num_nodes,
        doubt=1.0 if known else 1.6,
        is_recorded=name in _RECORDED and num_nodes == 1,
    )


def peak_flops(gpu_name: str | None) -> float | None:
    """Dense 16-bit FLOP/s of a GPU by the driver's name for it; None for one that is not listed."""
    known = _gpu(gpu_name)
    return None if known is None else known[1]


def _gpu(gpu_name: str | None) -> tuple[str, float, float, float, float] | None:
    """The first entry whose words all occur in `gpu_name`: "NVIDIA A100-SXM4-80GB" is an "A100"."""
    if gpu_name is None:
        return None
    text = f" {gpu_name.upper()} ".replace("-", " ").replace("_", " ")
    for listed in _GPUS:
        if all(f" {word} " in text for word in listed[0].upper().replace("-", " ").split()):
            return listed
    return None


def flops_per_token(workload: Workload) -> float:
    """Floating-point operations of forward and backward per token: 6·N, plus 6·L·h·s for causal attention.

    Each is 2·N for the outputs, for the gradients of inputs, and for those of weights. The last are computed for
    trained weights only, and the second from the first block that trains anything. The matrices of adapters come on
    top, with all three.
    """
    return forward_flops(workload) + _backward_flops(workload)


def forward_flops(workload: Workload) -> float:
    """Floating-point operations of the forward pass per token."""
    model = workload.model
    attention = model.num_layers * attention_flops(model.hidden_size, workload.seq_len) / 3
    return 2.0 * (model.num_matmul_parameters + _adapters(workload)) + attention


def attention_flops(width: float, length: int) -> float:
    """Operations of a token in causal attention with queries of `width` values: a third forward, the rest backward."""
    return 6.0 * width * length


def _backward_flops(workload: Workload) -> float:
    weights, model, adapters = workload.weights, workload.model, _adapters(workload)
    attention = model.num_layers * attention_flops(model.hidden_size, workload.seq_len) * 2 / 3
    if weights.is_whole:
        trained = float(model.num_matmul_parameters)
    else:
        trained = min(model.num_matmul_parameters, weights.trained - adapters) + adapters
    inputs = weights.reached_blocks * model.num_matmul_parameters + adapters
    return 2.0 * inputs + 2.0 * trained + weights.reached_blocks * attention


def _adapters(workload: Workload) -> float:
    """Elements of all adapters, each of which is a matrix."""
    return float(workload.weights.total - workload.model.num_parameters)


def mfu(workload: Workload, tokens_per_second: float, world_size: int, gpu_name: str | None) -> float | None:
    """Model FLOP/s utilisation of all GPUs, 0 to 1; recomputation does not count."""
    peak = peak_flops(gpu_name)
    return None if peak is None else flops_per_token(workload) * tokens_per_second / (peak * world_size)
