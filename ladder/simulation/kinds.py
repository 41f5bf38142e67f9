"""What a simulated machine knows of each kind of engine beside its step: those of DeepSpeed, DDP and FSDP2.

A backend says by its `kind` which of them its engines are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ladder.backends.deepspeed.config import engine_knobs
from ladder.backends.registry import backend_of
from ladder.candidates import Candidate, Engine, Rung, Technique
from ladder.events.protocol import TrialSpec
from ladder.step.assignment import Assignment
from ladder.workload.workload import Workload

_NO_KNOBS = {"stage", "zero_hpz_partition_size"}
"""What a configuration says beside knobs: the rung, and a technique."""


class Kind(ABC):
    """Engines that start in one way."""

    @abstractmethod
    def engine_in(
        self, spec: TrialSpec, rungs: Sequence[Rung], workload: Workload, techniques: tuple[Technique, ...]
    ) -> Engine:
        """The engine of one of `rungs` that a trial's `spec` describes, with knobs that differ from our defaults."""

    def built_on_host(self, step: Assignment) -> float:
        """Bytes of a model that every rank builds there before it moves to the GPU."""
        return 0.0

    def built_in_shards(self, step: Assignment) -> float:
        """Bytes of a model that is divided while it is built."""
        return 0.0

    def moved_to_host(self, step: Assignment) -> float:
        """Bytes of a rank's part of the parameters that are offloaded after they were built on the GPU."""
        return 0.0


class Zero(Kind):
    """DeepSpeed's."""

    def engine_in(
        self, spec: TrialSpec, rungs: Sequence[Rung], workload: Workload, techniques: tuple[Technique, ...]
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

    def built_in_shards(self, step: Assignment) -> float:
        return step.held if step.stage == 3 else 0.0

    def moved_to_host(self, step: Assignment) -> float:
        return step.held_share if step.parameter_device != "none" else 0.0


class Wrapped(Kind):
    """Without DeepSpeed: of DDP at stage 0, of FSDP2 at the others."""

    def engine_in(
        self, spec: TrialSpec, rungs: Sequence[Rung], workload: Workload, techniques: tuple[Technique, ...]
    ) -> Engine:
        """From the arguments of accelerate's plugin, which DDP has none of."""
        settings = (0, "none")
        if (fsdp := spec.deepspeed.get("fsdp")) is not None:
            settings = (3 if fsdp["reshard_after_forward"] else 2, "cpu" if fsdp["cpu_offload"] else "none")
        found = next(rung for rung in rungs if (rung.stage, rung.offload_param) == settings)
        return Engine(found, (), techniques)

    def built_on_host(self, step: Assignment) -> float:
        return step.stored if step.stage else 0.0


KINDS: dict[str, Kind] = {"zero": Zero(), "wrapped": Wrapped()}


def kind_of(candidate: Candidate) -> Kind:
    """Of the engine of `candidate`."""
    return KINDS[backend_of(candidate.engine.rung).kind]


def assignment_of(workload: Workload, candidate: Candidate, ranks: int) -> Assignment:
    """What the ranks of a trial of `candidate` do."""
    return backend_of(candidate.engine.rung).assignment(workload, candidate, ranks)
