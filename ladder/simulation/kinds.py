"""The kinds of assignments: those of DeepSpeed's stages, and those of DDP and FSDP2.

A backend says by its `kind` which of them its ranks have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from ladder.backends.deepspeed.config import engine_knobs
from ladder.backends.registry import backend_of
from ladder.candidates import Candidate, Engine, Rung, Technique
from ladder.events.protocol import TrialSpec
from ladder.simulation.allocation import Ledger
from ladder.simulation.assignment import Assignment
from ladder.simulation.gathering import Gathering, known_gathering
from ladder.simulation.host_memory import pinned_by_deepspeed, pinned_by_fsdp2
from ladder.simulation.plain_clock import PlainClock
from ladder.simulation.plain_stages import Averaged, Sharded
from ladder.simulation.step_clock import Rig, StepClock
from ladder.simulation.unit_gathering import units_gathered
from ladder.simulation.zero_stages import Divided, Partitioned, Replicated, Stage
from ladder.workload.workload import Workload

_NO_KNOBS = {"stage", "zero_hpz_partition_size"}
"""What a configuration says beside knobs: the rung, and a technique."""


class Zero(Assignment):
    """DeepSpeed's."""

    @classmethod
    def engine_in(
        cls, spec: TrialSpec, rungs: Sequence[Rung], workload: Workload, techniques: tuple[Technique, ...]
    ) -> Engine:
        zero, ranks = spec.deepspeed["zero_optimization"], spec.world_size
        devices = [zero.get(name, {}).get("device", "none") for name in ("offload_optimizer", "offload_param")]
        knobs = {name: value for name, value in zero.items() if name not in _NO_KNOBS and not isinstance(value, dict)}
        alike = [r for r in rungs if [r.stage, r.offload_optimizer, r.offload_param] == [zero["stage"], *devices]]
        for rung in alike:
            if engine_knobs(workload, Engine(rung), ranks) == knobs:
                return Engine(rung, (), techniques)
        usual = engine_knobs(workload, Engine(alike[0]), ranks)
        turned = tuple(sorted(pair for pair in knobs.items() if usual.get(pair[0]) != pair[1]))
        return Engine(alike[0], turned, techniques)

    @cached_property
    def knobs(self) -> Mapping[str, bool | int]:
        return engine_knobs(self.workload, self.candidate.engine, self.ranks)

    @property
    def masters_in_pages(self) -> bool:
        return self.stage == 3

    @property
    def built_in_shards(self) -> float:
        return self.held if self.stage == 3 else 0.0

    @property
    def moved_to_host(self) -> float:
        return self.held_share if self.parameter_device != "none" else 0.0

    def stage_on(self, ledger: Ledger) -> Stage:
        kinds: dict[int, type[Stage]] = {0: Replicated, 3: Divided}
        return kinds.get(self.stage, Partitioned)(self, ledger)

    @cached_property
    def gathering(self) -> Gathering:
        return known_gathering(self)

    def clock(self, rig: Rig) -> StepClock:
        return StepClock(self, self.gathering, rig)

    @property
    def pinned(self) -> list[float]:
        return list(pinned_by_deepspeed(self))


class Wrapped(Assignment):
    """Without DeepSpeed: of DDP at stage 0, of FSDP2 at the others."""

    @classmethod
    def engine_in(
        cls, spec: TrialSpec, rungs: Sequence[Rung], workload: Workload, techniques: tuple[Technique, ...]
    ) -> Engine:
        """From the arguments of accelerate's plugin, which DDP has none of."""
        settings = (0, "none")
        if (fsdp := spec.deepspeed.get("fsdp")) is not None:
            settings = (3 if fsdp["reshard_after_forward"] else 2, "cpu" if fsdp["cpu_offload"] else "none")
        found = next(rung for rung in rungs if (rung.stage, rung.offload_param) == settings)
        return Engine(found, (), techniques)

    @property
    def autocasts(self) -> bool:
        """Those of DDP; FSDP2 gathers them in 16 bits."""
        return self.stage == 0

    @property
    def loaded(self) -> float:
        """A rank's part of what rank 0 alone reads before FSDP2 divides it (accelerate, cpu_ram_efficient_loading)."""
        if self.stage == 0 or self.workload.load_in is not None:
            return 0.0
        each = 4.0 if self.workload.lora is None else 2.0
        return each * self.workload.model.num_parameters / self.ranks

    @property
    def built_on_host(self) -> float:
        return self.stored if self.stage else 0.0

    def stage_on(self, ledger: Ledger) -> Stage:
        return (Sharded if self.stage else Averaged)(self, ledger)

    @cached_property
    def gathering(self) -> Gathering:
        return units_gathered(self)

    def clock(self, rig: Rig) -> StepClock:
        return PlainClock(self, self.gathering, rig)

    @property
    def pinned(self) -> list[float]:
        return list(pinned_by_fsdp2(self))


KINDS: dict[str, type[Assignment]] = {"zero": Zero, "wrapped": Wrapped}


def assignment_of(workload: Workload, candidate: Candidate, ranks: int) -> Assignment:
    """What the ranks of a trial of `candidate` do."""
    return KINDS[backend_of(candidate.engine.rung).kind](workload, candidate, ranks)
