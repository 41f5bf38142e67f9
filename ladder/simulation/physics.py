"""How a candidate behaves on a simulated machine: seconds and bytes.

Both follow from the same description of a step from which the search predicts them (`ladder.step`), bent by what
differs between machines: its speeds are not those of data sheets, kernels and techniques reach more or less of them,
each part of the memory takes more or less than was counted, one rank needs more than the others, the allocator
fragments, and libraries take memory of their own. A machine may also differ in structure (`differs`). How far the
description is from real machines, recorded sweeps show: benchmarks/physics.py measures its error.

All deviations follow from the seed. The search knows nothing of them.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from ladder.backends.registry import BACKENDS, backend_of, family_of, is_main, kin_of
from ladder.candidates import Candidate, Engine, Rung
from ladder.events.protocol import TrialSpec
from ladder.machine.machine_speed import MachineSpeed, machine_speed
from ladder.simulation.paper_machine import SimulatedMachine
from ladder.step.assignment import Assignment
from ladder.step.clock import micro_step
from ladder.step.counted import Device
from ladder.step.host import PROCESS, host_use
from ladder.step.ledger import PARTS, START
from ladder.techniques.keys import technique_labelled
from ladder.units import GIB
from ladder.workload.workload import Workload

# Standard deviations, as logarithms, of a machine's deviations at `surprise` 1. Chosen: not less than what
# benchmarks/physics.py finds between recorded machines. There, within a sweep, families of engines are 10 % off (with
# these, 21 %, most of it by the machine's rates).
_STRAY = {
    "compute": 0.25,
    "memory_traffic": 0.20,
    "link": 0.30,
    "pcie": 0.25,
    "adam": 0.30,
    "disk": 0.40,
    "python": 0.30,
    "engine_time": 0.04,
    "depth_time": 0.05,
    "depth_update": 0.12,
    "engine_variant_time": 0.02,
    "knob_time": 0.015,
    "shape_time": 0.012,
    "technique_time": 1.0,  # of the technique's own doubt
    "start": 0.25,
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
"""Above this fraction of the limit, the allocator repeatedly empties its cache. Chosen."""
_HALF_LINK, _SLOW_HOST = 0.5, 3.0
"""What `differs` says: the rate of a link that has half of its lanes, and the host's work on one that is slow. The
second measured: 5 ms to launch a block from Python on a shared host, and 1.8 on others (benchmarks/results)."""
_MARGIN, _FRAGMENTED = (0.005, 0.05), (0.05, 0.15)
"""The least and the most that the allocator holds beyond what is allocated, as a share; and on a machine that
fragments. Chosen: recorded sweeps have 10 to 24 % with memory to spare (benchmarks/results/sweeps), and less near a
limit, where the allocator returns what is free."""
_OVERLAP = (0.6, 1.4)
"""The share of a reduction that overlaps, relative to the usual, at the least and at the most. Chosen."""
_PIN_BYTES, _PAGE_BYTES = 10e9, 8e9
"""Bytes per second of pinning host memory, and of touching it for the first time, by one rank (measured:
benchmarks/results/1xh200-pinning). The ranks of a node together are at most four times as fast (chosen)."""
_CONTEXT, _NCCL = 0.8 * GIB, 0.7 * GIB


@dataclass(frozen=True, kw_only=True)
class Truth:
    """How one candidate behaves on a simulated machine, without noise."""

    accumulate_seconds: float
    boundary_seconds: float
    allocated: int
    """Peak bytes of the rank that uses most."""
    reserved: int
    outside: int
    """Context, NCCL, libraries."""
    at_start: int
    """Bytes of the engine before its first step, everything included."""
    moment: str
    """The moment of the peak."""
    host: int
    """Bytes of all ranks."""
    disk: int

    @property
    def device(self) -> int:
        return self.reserved + self.outside

    def step_seconds(self, accumulation: int) -> float:
        return (accumulation - 1) * self.accumulate_seconds + self.boundary_seconds


class Physics:
    """Simulates one machine for one workload on `world_size` ranks."""

    def __init__(self, machine: SimulatedMachine, workload: Workload, world_size: int, device: Device = "cuda") -> None:
        self._device = device
        self._machine, self._workload, self.world_size = machine, workload, world_size
        self._nodes = -(-world_size // machine.num_gpus)
        self.speed = self._speed()
        self._known: dict[Candidate, Truth] = {}

    def truth(self, candidate: Candidate) -> Truth:
        """How `candidate` behaves."""
        if candidate not in self._known:
            self._known[candidate] = self._truth(candidate)
        return self._known[candidate]

    @property
    def seed(self) -> int:
        """By which the machine was drawn."""
        return self._machine.seed

    def engine_of(self, spec: TrialSpec) -> Engine:
        """The engine that `spec` configures, with knobs that differ from our defaults."""
        backend = next(each for each in BACKENDS.values() if each.rank_module == spec.backend_module)
        techniques = tuple(technique_labelled(label) for label in spec.techniques)
        return backend.engine_in(spec.deepspeed, self._workload, spec.world_size, techniques)

    def limit_factor(self, truth: Truth, limit: int) -> float:
        """How much slower a candidate is if its memory is close to `limit`."""
        excess = truth.device / limit - _THRASHES_FROM
        return 1.0 if excess <= 0 else 1.0 + 0.15 * excess / (1 - _THRASHES_FROM)

    def start_seconds(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds to build the model and to initialise the engine, from the memory to fill, pin and write."""
        step = self._assignment(candidate)
        use, together = host_use(step), max(1.0, min(self.world_size, self._machine.num_gpus) / 4)
        model = 0.1 + 2.0 * self._workload.weights.total / 40e9  # random weights on the GPU, 16 bits each
        model += together * step.loaded / _PAGE_BYTES
        if step.stage == 3:  # it is divided while it is built
            model += step.held / self.world_size / 10e9
        if step.parameter_device != "none":
            model += step.held_share * (1 / self.speed.pcie_bytes + 2 / _PAGE_BYTES)
        engine = 0.3 + 14.0 * step.share / 40e9
        engine += together * (use.pinned / _PIN_BYTES + max(0.0, step.pageable()) / _PAGE_BYTES)
        engine += use.disk * self.world_size / self.speed.nvme_bytes
        factor = self._stray("start")
        return model * factor, engine * factor

    def _speed(self) -> MachineSpeed:
        """The speeds that this machine has, of which the search only knows the GPU's name and the number of cores."""
        machine, cores = self._machine, self._machine.num_cores * self._nodes
        listed = machine_speed(machine.gpu_name, "cuda", self.world_size, cores, self._nodes)
        between = machine.link_bytes if self._nodes == 1 else min(machine.link_bytes, machine.network_bytes)
        link = _HALF_LINK if machine.differs == "half link" else 1.0
        host = self._stray("python") * (_SLOW_HOST if machine.differs == "slow host" else 1.0)
        return replace(
            listed,
            flops=machine.flops,
            achievable=min(0.9, listed.achievable / self._stray("compute")),
            flops_32=listed.flops_32 * machine.flops / listed.flops,
            device_bytes=machine.device_bytes * min(1.2, 1 / self._stray("memory_traffic")),
            link_bytes=link * between / self._stray("link"),
            node_link_bytes=link * machine.link_bytes / self._stray("link", "" if self._nodes == 1 else "in a node"),
            pcie_bytes=machine.pcie_bytes / self._stray("pcie"),
            cpu_adam_parameters=listed.cpu_adam_parameters / self._stray("adam"),
            nvme_bytes=machine.nvme_bytes * self._nodes / self._stray("disk"),
            host_seconds=listed.host_seconds * host,
            launch_seconds=listed.launch_seconds * host,
        )

    def _assignment(self, candidate: Candidate) -> Assignment:
        return backend_of(candidate.engine.rung).assignment(self._workload, candidate, self.world_size)

    def _stray(self, term: str, of: str = "") -> float:
        scatter = _STRAY[term] * self._machine.surprise
        return math.exp(random.Random(f"{self._machine.seed} {self._machine.name} {term} {of}").gauss(0, 1) * scatter)

    def _drawn(self, what: str, low: float, high: float) -> float:
        """A random value between two bounds; the middle for a machine with `surprise` 0."""
        share = random.Random(f"{self._machine.seed} {what}").uniform(-0.5, 0.5) * min(1.0, self._machine.surprise)
        return low + (high - low) * (0.5 + share)

    def _truth(self, candidate: Candidate) -> Truth:
        assignment = self._assignment(candidate)
        use = host_use(assignment)
        totals = self._totals(candidate)
        moment = max((name for name in totals if name != START), key=lambda name: totals[name])
        fullest_rank = 1 + self._machine.rank_spread if self.world_size > 1 else 1.0
        allocated = totals[moment] * fullest_rank
        bounds = [bound * min(1.0, self._machine.surprise) for bound in _MARGIN]
        if self._machine.differs == "fragments":
            bounds = list(_FRAGMENTED)
        margin = random.Random(f"{self._machine.seed} fragments {candidate.key}").uniform(*bounds)
        reserved = int(allocated * (1 + margin))
        outside = 0
        if self._device == "cuda":
            outside = int((_CONTEXT + (_NCCL if self.world_size > 1 else 0)) * self._stray("outside"))
        accumulate, update = self._seconds(assignment)
        host = (PROCESS + use.held) * self.world_size * self._stray("host", family_of(candidate.engine.rung))
        return Truth(
            accumulate_seconds=accumulate,
            boundary_seconds=update,
            allocated=int(allocated),
            reserved=reserved,
            outside=outside,
            at_start=int(totals.get(START, 0.0)) + outside,
            moment=moment if moment != "initialisation" else "step",
            host=int(host),
            disk=int(use.disk * self.world_size),
        )

    def _totals(self, candidate: Candidate) -> dict[str, float]:
        """Bytes allocated at the fullest of each of a candidate's moments, with this machine's factors."""
        rung = candidate.engine.rung
        kept = "recomputed" if candidate.gradient_checkpointing else "activations"
        factors = {part: self._stray(part) for part in ("logits", "buffers", "live")}
        factors["activations"] = self._stray(kept) * self._stray("engine_variant_time", f"memory {rung.name}")
        of_states = self._stray("states", rung.name)
        totals: dict[str, float] = {}
        for moment in backend_of(rung).moments(self._workload, candidate, self.world_size, self._device):
            total = sum(factors.get(part, of_states) * getattr(moment, part) for part in PARTS)
            totals[moment.name] = max(totals.get(moment.name, 0.0), total + self._second_copy)
        return totals

    @property
    def _second_copy(self) -> float:
        """Bytes of a tied head that libraries hold a second time, as was recorded with quantised models."""
        model = self._workload.model
        return 2.0 * model.vocab_size * model.hidden_size if self._machine.differs == "second copy" else 0.0

    def _seconds(self, assignment: Assignment) -> tuple[float, float]:
        """Seconds of a micro-step without and with the optimizer."""
        candidate, parts = assignment.candidate, assignment.time_on(self.speed)
        accumulate = micro_step(
            compute=parts.compute + parts.ramp,
            reduce=parts.reduce,
            hidden=min(1.0, parts.hidden * self._drawn("overlap", *_OVERLAP)),
            beside=parts.exchange + parts.inputs + parts.handling,
            gather=parts.gather,
            launch=parts.launch,
            overlaps=self._machine.differs != "no overlap",
        )
        # Engines that differ only in knobs deviate little from each other (measured: 1.5 and 1.8 %).
        rung, key = candidate.engine.rung, candidate.engine.key
        program = _program_of(rung)
        turned = candidate.engine.knobs or rung.knobs
        whole = self._stray("engine_time", program) * (self._stray("knob_time", key) if turned else 1)
        whole *= self._stray("engine_variant_time", f"{rung.name} {candidate.checkpointing}")
        for technique in candidate.engine.techniques:
            whole *= self._stray("technique_time", technique.name) ** technique.time_doubt
        micro = accumulate * self._stray("shape_time", f"{candidate.checkpointing} {candidate.micro_batch}")
        # An engine deviates differently at each depth, so a few layers do not show everything.
        layers = self._workload.model.num_layers
        micro *= self._stray("depth_time", f"{program} {layers}")
        update = parts.update * self._stray("depth_update", f"{kin_of(rung)} {rung.offload_optimizer} {layers}")
        return micro * whole, (micro + update) * whole


def _program_of(rung: Rung) -> str:
    """What deviates as one, wherever its states are: a stage; FSDP2 with and without dividing weights again."""
    return f"{kin_of(rung)} {rung.stage if is_main(rung) or not rung.stage else 3}"
