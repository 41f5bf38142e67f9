"""The step of DeepSpeed's engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from ladder.backends.deepspeed.clock import zero_time
from ladder.backends.deepspeed.config import engine_knobs
from ladder.backends.deepspeed.gathering import SETTINGS, gathering_of
from ladder.backends.deepspeed.host import pinned_by_deepspeed
from ladder.backends.deepspeed.stages import Divided, Partitioned, Replicated
from ladder.machine.machine_speed import MachineSpeed
from ladder.step.assignment import Assignment
from ladder.step.clock import StepParts
from ladder.step.gathering import Gathering
from ladder.step.ledger import Ledger
from ladder.step.stage import Stage


class Zero(Assignment):
    """What the ranks of a ZeRO stage do."""

    @cached_property
    def knobs(self) -> Mapping[str, bool | int]:
        return engine_knobs(self.workload, self.candidate.engine, self.ranks)

    @property
    def master_bytes(self) -> float:
        """At stage 0 in fp32 the optimizer has no wrapper, and weights are their own masters."""
        return 0.0 if self.workload.dtype == "fp32" and self.stage == 0 else self.effects.master_bytes

    def pinned(self) -> Iterator[float]:
        return pinned_by_deepspeed(self)

    def pageable(self) -> float:
        """At stage 3 master weights are pageable too."""
        masters = self.master_bytes if self.stage == 3 else 0.0
        return (masters + self.state_bytes) * self.share if self.optimizer_device == "cpu" else 0.0

    def disk(self) -> float:
        states = (self.master_bytes + self.state_bytes) * self.share if self.optimizer_device == "nvme" else 0.0
        return states + (self.held_share if self.parameter_device == "nvme" else 0.0)

    def time_on(self, machine: MachineSpeed) -> StepParts:
        return zero_time(self, machine)

    def stage_on(self, ledger: Ledger) -> Stage:
        kinds: dict[int, type[Stage]] = {0: Replicated, 3: Divided}
        return kinds.get(self.stage, Partitioned)(self, ledger)

    @cached_property
    def gathering(self) -> Gathering:
        """It is the same with any micro-batch, and with any number of ranks above one."""
        is_there = self.stage < 3 or (self.ranks == 1 and self.parameter_device == "none")
        settings = () if is_there else tuple(self.knobs[name] for name in SETTINGS)
        key = ("gathering", settings, self.candidate.checkpoint_every, self.ranks > 1)
        return self.workload.remembered(key, lambda: gathering_of(self))
