"""How a candidate behaves on a simulated machine: seconds and bytes.

Memory is that of the same walk through a step from which the search predicts it (`ladder.step`), bent by what differs
between machines: each part takes more or less than was counted, one rank needs more than the others, the allocator
fragments, and libraries take memory of their own. Time is a simulation of host, GPU, links and bus in parallel
(`step_clock`), which shares no formula with the search's model of it, so that it can test it. Recorded sweeps show how
accurate both are: benchmarks/physics.py measures their error (benchmarks/results/search/physics.txt).

Each machine deviates by its own factors, some kernels by their shapes, and the allocator slows down near the limit. All
deviations follow from the seed.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from ladder.backends.registry import BACKENDS, backend_of, family_of, is_main
from ladder.candidates import Candidate, Engine, Rung
from ladder.events.protocol import TrialSpec
from ladder.simulation.kernel_time import Chip
from ladder.simulation.kinds import KINDS, assignment_of, clock_of, kind_of
from ladder.simulation.paper_machine import SimulatedMachine
from ladder.simulation.step_clock import Rig, StepClock
from ladder.step.assignment import Assignment
from ladder.step.counted import Device
from ladder.step.host import host_use
from ladder.step.ledger import PARTS, START
from ladder.techniques.keys import technique_labelled
from ladder.units import GIB
from ladder.workload.workload import Workload

# Standard deviations, as logarithms, of a machine's deviations at `surprise` 1. Chosen: not less than what
# benchmarks/physics.py finds between recorded machines.
_STRAY = {
    "compute": 0.25,
    "memory_traffic": 0.20,
    "link": 0.30,
    "latency": 0.40,
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
_PRODUCTS, _ELEMENT_WISE = 0.62, 0.78
"""The fraction of the data sheet's operations and bytes per second that large kernels reach (measured: fitted to the
recorded sweeps on H200)."""
_LAUNCH = 26e-6
"""Seconds to launch a kernel from Python, with hooks of modules and autograd (measured: fitted to small
micro-batches)."""
_LATENCY = 20e-6
"""Seconds of a collective's step. Chosen: NCCL within a node takes 10 to 30 microseconds."""
_CORE_BYTES, _NODE_BYTES = 5e9, 350e9
"""Bytes a second of the host's memory that one core moves in CPU Adam, and that all cores of a node share: 65, 110 and
165 GB/s with 16, 32 and 64 cores of the recorded hosts."""
_PIN_BYTES, _PAGE_BYTES = 10e9, 8e9
"""Bytes per second of pinning host memory, and of touching it for the first time, by one rank (measured:
benchmarks/results/1xh200-pinning). The ranks of a node together are at most four times as fast (chosen)."""
_PROCESS = 1.68 * GIB
"""Resident memory of a rank that offloads nothing (measured: 1.62 to 1.79 GiB in recorded sweeps without offload)."""
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
        self._machine, self._workload, self._world_size = machine, workload, world_size
        self._nodes = -(-world_size // machine.num_gpus)
        self.rig = self._make_rig()
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
        return KINDS[backend.kind].engine_in(spec, backend.rungs, self._workload, techniques)

    def limit_factor(self, truth: Truth, limit: int) -> float:
        """How much slower a candidate is if its memory is close to `limit`."""
        excess = truth.device / limit - _THRASHES_FROM
        return 1.0 if excess <= 0 else 1.0 + 0.15 * excess / (1 - _THRASHES_FROM)

    def start_seconds(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds to build the model and to initialise the engine, from the memory to fill, pin and write."""
        step, kind = assignment_of(self._workload, candidate, self._world_size), kind_of(candidate)
        use, together = host_use(step), max(1.0, min(self._world_size, self._machine.num_gpus) / 4)
        model = 0.1 + 2.0 * self._workload.weights.total / 40e9  # random weights on the GPU, 16 bits each
        model += together * kind.built_on_host(step) / _PAGE_BYTES
        model += kind.built_in_shards(step) / self._world_size / 10e9
        model += kind.moved_to_host(step) / self.rig.bus + 2.0 * kind.moved_to_host(step) / _PAGE_BYTES
        engine = 0.3 + 14.0 * step.share / 40e9
        engine += together * (use.pinned / _PIN_BYTES + max(0.0, step.pageable()) / _PAGE_BYTES)
        engine += use.disk / self.rig.drive
        factor = self._stray("start")
        return model * factor, engine * factor

    def _make_rig(self) -> Rig:
        machine = self._machine
        local = min(self._world_size, machine.num_gpus)
        between = machine.link_bytes if self._nodes == 1 else min(machine.link_bytes, machine.network_bytes)
        dram = 1 / (1 / (_CORE_BYTES * machine.num_cores) + 1 / _NODE_BYTES) / local
        chip = Chip(
            flops=machine.flops * min(0.9, _PRODUCTS / self._stray("compute")),
            memory=machine.device_bytes * min(0.95, _ELEMENT_WISE / self._stray("memory_traffic")),
            processors=round(self._drawn("processors", 60, 148)),
        )
        return Rig(
            chip=chip,
            launch=_LAUNCH,
            host=self._stray("python"),
            link=between / self._stray("link"),
            latency=_LATENCY * (1.0 if self._nodes == 1 else 2.0) * self._stray("latency"),
            node_link=machine.link_bytes / self._stray("link", "" if self._nodes == 1 else "in a node"),
            node_latency=_LATENCY * self._stray("latency"),
            contention=self._drawn("contention", 0.1, 0.6),
            bus=machine.pcie_bytes / self._stray("pcie"),
            dram=dram / self._stray("adam"),
            drive=machine.nvme_bytes / local / self._stray("disk"),
        )

    def _stray(self, term: str, of: str = "") -> float:
        scatter = _STRAY[term] * self._machine.surprise
        return math.exp(random.Random(f"{self._machine.seed} {self._machine.name} {term} {of}").gauss(0, 1) * scatter)

    def _drawn(self, what: str, low: float, high: float) -> float:
        """A random value between two bounds; the middle for a machine with `surprise` 0."""
        share = random.Random(f"{self._machine.seed} {what}").uniform(-0.5, 0.5) * min(1.0, self._machine.surprise)
        return low + (high - low) * (0.5 + share)

    def _truth(self, candidate: Candidate) -> Truth:
        assignment = assignment_of(self._workload, candidate, self._world_size)
        use = host_use(assignment)
        totals = self._totals(candidate)
        moment = max((name for name in totals if name != START), key=lambda name: totals[name])
        fullest_rank = 1 + self._machine.rank_spread if self._world_size > 1 else 1.0
        allocated = totals[moment] * fullest_rank
        margin = random.Random(f"{self._machine.seed} fragments {candidate.key}").uniform(0.005, 0.05)
        reserved = int(allocated * (1 + margin * min(1.0, self._machine.surprise)))
        outside = 0
        if self._device == "cuda":
            outside = int((_CONTEXT + (_NCCL if self._world_size > 1 else 0)) * self._stray("outside"))
        accumulate, update = self._seconds(assignment)
        host = (_PROCESS + use.held) * self._world_size * self._stray("host", family_of(candidate.engine.rung))
        return Truth(
            accumulate_seconds=accumulate,
            boundary_seconds=update,
            allocated=int(allocated),
            reserved=reserved,
            outside=outside,
            at_start=int(totals.get(START, 0.0)) + outside,
            moment=moment if moment != "initialisation" else "step",
            host=int(host),
            disk=int(use.disk * self._world_size),
        )

    def _totals(self, candidate: Candidate) -> dict[str, float]:
        """Bytes allocated at the fullest of each of a candidate's moments, with this machine's factors."""
        rung = candidate.engine.rung
        kept = "recomputed" if candidate.gradient_checkpointing else "activations"
        factors = {part: self._stray(part) for part in ("logits", "buffers", "live")}
        factors["activations"] = self._stray(kept) * self._stray("engine_variant_time", f"memory {rung.name}")
        of_states = self._stray("states", rung.name)
        totals: dict[str, float] = {}
        for moment in backend_of(rung).moments(self._workload, candidate, self._world_size, self._device):
            total = sum(factors.get(part, of_states) * getattr(moment, part) for part in PARTS)
            totals[moment.name] = max(totals.get(moment.name, 0.0), total)
        return totals

    def _seconds(self, assignment: Assignment) -> tuple[float, float]:
        """Seconds of a micro-step without and with the optimizer."""
        candidate, clock = assignment.candidate, clock_of(assignment, self.rig)
        accumulate, boundary = _micro_steps(clock, candidate)
        update = clock.update() + boundary - accumulate
        # Engines that differ only in knobs deviate little from each other (measured: 1.5 and 1.8 %).
        rung, key = candidate.engine.rung, candidate.engine.key
        family = _program_of(rung)
        turned = candidate.engine.knobs or rung.knobs
        whole = self._stray("engine_time", family) * (self._stray("knob_time", key) if turned else 1)
        whole *= self._stray("engine_variant_time", f"{rung.name} {candidate.checkpointing}")
        micro = accumulate * self._stray("shape_time", f"{candidate.checkpointing} {candidate.micro_batch}")
        # An engine deviates differently at each depth, so a few layers do not show everything.
        depth = f"{family} {self._workload.model.num_layers}"
        micro, update = micro * self._stray("depth_time", depth), update * self._stray("depth_update", depth)
        return micro * whole, (micro + update) * whole


def _program_of(rung: Rung) -> str:
    """What deviates as one: FSDP2 is the same program whether it divides weights again after the forward pass."""
    return family_of(rung if is_main(rung) or not rung.stage else replace(rung, stage=3))


def _micro_steps(clock: StepClock, candidate: Candidate) -> tuple[float, float]:
    """Seconds of a micro-step without the optimizer, on the average of a step, and of forward and backward with it."""
    if not candidate.engine.first_differs:
        return clock.micro_step(boundary=False), clock.micro_step(boundary=True)
    before = candidate.accumulation - 1
    first, later = (clock.micro_step(boundary=False, first=first) for first in (True, False))
    average = (first + (before - 1) * later) / before if before else first
    return average, clock.micro_step(boundary=True, first=not before)
