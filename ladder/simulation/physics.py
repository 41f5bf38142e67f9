"""What a simulated machine really does with a candidate: seconds and bytes, by laws the search does not know.

The search's own formulae are its hypothesis; here they only give the quantities of a step (how many operations, how
many bytes of what). What becomes of them differs on purpose: each term strays by a factor of the machine's own, compute
has a start-up share that small batches feel, overlap follows another law, kernels have quirks for some shapes, memory
is handed out in blocks, the allocator fragments and thrashes near the limit. All of it follows from the seed.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from ladder.backends.activations import offloaded_input, tokens_of_a_rank
from ladder.backends.base import Device, Moment
from ladder.backends.deepspeed.config import engine_knobs
from ladder.backends.deepspeed.memory import moments_of, offloaded
from ladder.candidates import RUNGS, Candidate, Engine
from ladder.events.protocol import TrialSpec
from ladder.machine.machine_speed import flops_per_token
from ladder.simulation.paper_machine import SimulatedMachine
from ladder.techniques.registry import TECHNIQUES
from ladder.units import GIB, MIB
from ladder.workload.workload import Workload

# Standard deviations, as logarithms, of how far a machine's terms stray from the textbook at `surprise` 1.
_STRAY = {
    "compute": 0.25,
    "recompute": 0.04,
    "memory_traffic": 0.20,
    "link": 0.30,
    "latency": 0.40,
    "pcie": 0.25,
    "adam": 0.30,
    "disk": 0.40,
    "gather": 0.30,
    "engine_time": 0.04,
    "depth_time": 0.05,
    "depth_update": 0.12,
    "engine_variant_time": 0.02,
    "knob_time": 0.015,
    "shape_time": 0.012,
    "start": 0.25,
    "liger": 0.06,
    "activations": 0.10,
    "recomputed": 0.10,
    "logits": 0.10,
    "buffers": 0.20,
    "live": 0.08,
    "states": 0.01,
    "host": 0.06,
    "outside": 0.15,
}
_THRASHES_FROM = 0.97
"""Of the limit: above it the allocator gives its cache back again and again."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What one candidate does on a simulated machine, without noise."""

    accumulate_seconds: float
    boundary_seconds: float
    allocated: int
    """Bytes of the fullest rank at the fullest moment."""
    reserved: int
    outside: int
    """Context, NCCL, libraries."""
    at_start: int
    """Bytes of the engine before its first step, all included."""
    moment: str
    """The fullest one."""
    host: int
    """Bytes of all ranks."""
    disk: int

    @property
    def device(self) -> int:
        return self.reserved + self.outside

    def step_seconds(self, accumulation: int) -> float:
        return (accumulation - 1) * self.accumulate_seconds + self.boundary_seconds


class Physics:
    """The laws of one machine for one workload on `world_size` ranks."""

    def __init__(self, machine: SimulatedMachine, workload: Workload, world_size: int, device: Device = "cuda") -> None:
        self._device = device
        self._machine, self._workload, self._world_size = machine, workload, world_size
        within = min(1.0, machine.num_gpus / world_size)
        slowest_link = machine.link_bytes if within == 1.0 else min(machine.link_bytes, machine.network_bytes)
        self._link = slowest_link / self._stray("link")
        self._nodes = -(-world_size // machine.num_gpus)
        self._overlap = random.Random(f"{machine.seed} overlap").uniform(0.4, 0.9)
        self._exponent = random.Random(f"{machine.seed} exponent").uniform(2.5, 8.0)
        self._half_tokens = random.Random(f"{machine.seed} half").uniform(0.1, 0.9) * machine.flops / 1e12
        self._known: dict[Candidate, Truth] = {}
        self._efficiency = min(0.8, 0.55 / self._stray("compute"))

    def truth(self, candidate: Candidate) -> Truth:
        """What `candidate` does."""
        if candidate not in self._known:
            self._known[candidate] = self._truth(candidate)
        return self._known[candidate]

    def engine_of(self, spec: TrialSpec) -> Engine:
        """The engine that `spec` configures, with the knobs that differ from our defaults."""
        config = spec.deepspeed
        techniques = tuple(TECHNIQUES[name] for name in spec.techniques)
        zero = config["zero_optimization"]
        devices = [zero.get(name, {}).get("device", "none") for name in ("offload_optimizer", "offload_param")]
        knobs = {name: value for name, value in zero.items() if name != "stage" and not isinstance(value, dict)}
        rungs = [r for r in RUNGS if [r.stage, r.offload_optimizer, r.offload_param] == [zero["stage"], *devices]]
        for rung in rungs:
            if engine_knobs(self._workload, Engine(rung)) == knobs:
                return Engine(rung, (), techniques)
        usual = engine_knobs(self._workload, Engine(rungs[0]))
        turned = tuple(sorted(pair for pair in knobs.items() if usual.get(pair[0]) != pair[1]))
        return Engine(rungs[0], turned, techniques)

    def _truth(self, candidate: Candidate) -> Truth:
        fullest, allocated, at_start = self._memory(candidate)
        margin = random.Random(f"{self._machine.seed} fragments {candidate.key}").uniform(0.005, 0.05)
        reserved = int(allocated * (1 + margin * min(1.0, self._machine.surprise)))
        outside = 0
        if self._device == "cuda":
            outside = int((0.8 * GIB + (0.7 * GIB if self._world_size > 1 else 0)) * self._stray("outside"))
        accumulate, update = self._seconds(candidate)
        host, _ = offloaded(self._workload, candidate, self._world_size)
        host = (1.9 * GIB * self._world_size + host) * self._stray("host", candidate.engine.rung.family)
        return Truth(
            accumulate_seconds=accumulate,
            boundary_seconds=accumulate + update,
            allocated=int(allocated),
            reserved=reserved,
            outside=outside,
            at_start=int(at_start) + outside,
            moment=fullest.name if fullest.name != "initialisation" else "step",
            host=int(host),
            disk=self._disk(candidate),
        )

    def limit_factor(self, truth: Truth, limit: int) -> float:
        """How much slower a candidate is whose memory is nearly all of `limit`."""
        excess = truth.device / limit - _THRASHES_FROM
        return 1.0 if excess <= 0 else 1.0 + 0.15 * excess / (1 - _THRASHES_FROM)

    def start_seconds(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds to build the model and to initialise the engine."""
        rung, billions = candidate.engine.rung, self._workload.model.num_parameters / 1e9
        model = (
            0.1
            + (0.05 * billions if rung.stage == 3 else 0.0)
            + (0.3 * billions if rung.offload_param != "none" else 0.0)
        )
        engine = 2.0 + 0.35 * billions
        if rung.offload_optimizer == "cpu":
            engine += 4.0 + 2.0 * billions * 64 / max(32, self._machine.num_cores)
        if "nvme" in rung.devices:
            engine += 5.0 + 16 * billions * 1e9 / self._machine.nvme_bytes * self._stray("disk")
        factor = self._stray("start")
        return model * factor, engine * factor

    def _stray(self, term: str, of: str = "") -> float:
        scatter = _STRAY[term] * self._machine.surprise
        return math.exp(random.Random(f"{self._machine.seed} {self._machine.name} {term} {of}").gauss(0, 1) * scatter)

    def _memory(self, candidate: Candidate) -> tuple[Moment, float, float]:
        """The fullest moment, its bytes on the fullest rank, and the bytes of the engine at rest."""
        name = candidate.engine.rung.name
        moments = moments_of(self._workload, candidate, self._world_size, self._device)
        tokens = tokens_of_a_rank(self._workload, candidate, self._world_size)
        # Attention and rotary embeddings keep scratch space that the textbook leaves out, more for larger batches.
        scratch = 40.0 * tokens * self._workload.model.hidden_size * (tokens / 8192) ** 0.1 / 10
        kind = "recomputed" if candidate.gradient_checkpointing else "activations"
        factors = {
            "activations": self._stray(kind) * self._stray("engine_variant_time", f"memory {name}"),
            "logits": self._stray("logits"),
            "buffers": self._stray("buffers"),
            "live": self._stray("live"),
        }
        states = self._stray("states", name)
        sizes = []
        for moment in moments:
            scaled = replace(moment, **{name: getattr(moment, name) * factor for name, factor in factors.items()})
            busy = scaled.activations + scaled.logits + scaled.buffers + scaled.live
            size = states * (scaled.parameters + scaled.gradients + scaled.optimizer) + busy
            if moment.name in ("forward", "loss", "backward"):
                size += scratch * self._machine.surprise
            sizes.append(_in_blocks(size, self._workload.model.num_layers))
        top = max(range(len(sizes)), key=sizes.__getitem__)
        fullest_rank = 1 + self._machine.rank_spread if self._world_size > 1 else 1.0
        return moments[top], sizes[top] * fullest_rank, sizes[0]

    def _seconds(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds of an accumulating micro-step, and what the boundary adds."""
        rung, key = candidate.engine.rung, candidate.engine.key
        machine, model, n = self._machine, self._workload.model, self._world_size
        p, share = model.num_parameters, model.num_parameters / n
        compute = self._compute_seconds(candidate)
        knobs = engine_knobs(self._workload, candidate.engine)
        pcie = machine.pcie_bytes / self._stray("pcie")
        latency = 25e-6 * math.log2(2 * n) * self._stray("latency")
        transfer = 2.0 * p * (n - 1) / n / self._link
        messages = p / max(1, int(knobs.get("reduce_bucket_size", 5e8))) + 1
        reduce = gather = update = 0.0
        if n > 1:
            if rung.stage >= 2:
                reduce = 2 * transfer + messages * latency
            else:
                update += 2 * transfer + messages * latency
            if rung.stage in (1, 2):
                update += transfer + messages * latency
        if rung.stage == 3:
            passes = 2 + candidate.checkpointed
            hooks = 0.0125 * model.num_layers * (0.8 + 0.2 * candidate.checkpointed)
            gather = hooks * self._stray("gather") + (passes * transfer + 2 * model.num_layers * latency) * 0.7
        if rung.stage < 3 and rung.offload_optimizer != "none":
            if rung.stage == 1:
                update += 2 * share / pcie
            else:
                reduce += 4 * share / pcie
        if rung.offload_param != "none":
            kept = min(1.0, knobs["stage3_max_live_parameters"] / p)
            disk = machine.nvme_bytes * self._nodes / n / self._stray("disk")
            gather += 4 * share * (1 - kept) / (pcie if rung.offload_param == "cpu" else min(pcie, disk))
        hidden = self._overlap if knobs.get("overlap_comm") else 0.1
        busy = compute + max(reduce * (1 - hidden), reduce - hidden * 0.6 * compute)
        if candidate.engine.shares_sequences:
            heads = tokens_of_a_rank(self._workload, candidate, n) * (model.num_heads + model.num_kv_heads)
            passes = (2 + candidate.checkpointed) * model.num_layers
            busy += passes * (4 * heads * model.head_dim * (n - 1) / n / self._link + 4 * latency)
        busy += 2 * model.num_layers * offloaded_input(self._workload, candidate, n) / pcie
        micro = (busy**self._exponent + gather**self._exponent) ** (1 / self._exponent)
        update += self._update_seconds(candidate, pcie)
        # Engines that differ in knobs only are alike but for a little (measured: 1.5 and 1.8 %).
        family = rung.family
        turned = candidate.engine.knobs or rung.knobs
        whole = self._stray("engine_time", family) * (self._stray("knob_time", key) if turned else 1)
        variant = {"on": "ckpt", "off": "whole"}.get(candidate.checkpointing, candidate.checkpointing)
        whole *= self._stray("engine_variant_time", f"{rung.name} {variant}")
        micro *= self._stray("shape_time", f"{variant} {candidate.micro_batch}")
        # A few layers do not tell all about many: an engine strays at each depth in a way of its own.
        depth = f"{family} {model.num_layers}"
        micro, update = micro * self._stray("depth_time", depth), update * self._stray("depth_update", depth)
        return micro * whole, update * whole

    def _compute_seconds(self, candidate: Candidate) -> float:
        """Kernels: operations at an efficiency that grows with the batch, and traffic to the GPU's memory."""
        model, workload = self._workload.model, self._workload
        tokens = tokens_of_a_rank(workload, candidate, self._world_size)
        again = 1 + candidate.checkpointed * (4 / 3 * self._stray("recompute") - 1)
        operations = flops_per_token(workload) * again / (self._machine.flops * self._efficiency)
        liger = any(each.name == "liger" for each in candidate.engine.techniques)
        width = model.hidden_size * (16 if liger else 24) + model.intermediate_size * (6 if liger else 8)
        traffic = tokens * (2.2 * again * model.num_layers * width + (14 if liger else 30) * model.vocab_size)
        launches = 0.0013 * model.num_layers * again
        kernels = operations * (tokens + self._half_tokens)
        kernels += 0.5 * traffic / self._machine.device_bytes * self._stray("memory_traffic")
        return float((kernels**3 + launches**3) ** (1 / 3)) * (self._stray("liger") if liger else 1.0)

    def _update_seconds(self, candidate: Candidate, pcie: float) -> float:
        """The optimizer, wherever it is, and the way back of what it updated."""
        rung, machine, n = candidate.engine.rung, self._machine, self._world_size
        p, share = self._workload.model.num_parameters, self._workload.model.num_parameters / n
        if rung.offload_optimizer == "none":
            owned = share if rung.stage else p
            widths = {"bf16-states": 30, "adam-8bit": 48}
            width = next((widths[each.name] for each in candidate.engine.numerics), 60)
            seconds = width * owned / machine.device_bytes * self._stray("memory_traffic") + 0.004
            return seconds + (80 * share / pcie if rung.offload_param == "cpu" else 0.0)
        if rung.offload_optimizer == "cpu":
            rate = 45e6 * min(machine.num_cores, 96) * self._nodes / self._stray("adam")
            return p / rate + 2 * share / pcie
        return 30 * p / (machine.nvme_bytes * self._nodes) * self._stray("disk") + 2 * share / pcie

    def _disk(self, candidate: Candidate) -> int:
        rung, p = candidate.engine.rung, self._workload.model.num_parameters
        return int((12 * p if rung.offload_optimizer == "nvme" else 0) + (2 * p if rung.offload_param == "nvme" else 0))


def _in_blocks(num_bytes: float, num_layers: int) -> float:
    """Rounded up as an allocator does it: each layer's share to whole blocks of 2 MiB."""
    block = 2 * MIB * num_layers
    return math.ceil(num_bytes / block) * block
