"""The step of engines without DeepSpeed: of DDP at stage 0, of FSDP2 at the others.

Weights are in fp32 and computed with in 16 bits or, if so asked, in fp32; they are their own masters. With DDP, a
script may train 16-bit weights without any; FSDP2 makes them fp32 (accelerate 1.15). Frozen weights beside adapters are
in 16 bits, or in fewer where they are quantised; where peft has prepared these, all others are in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from ladder.backends.plain.clock import wrapped_time
from ladder.backends.plain.gathering import units_gathered
from ladder.backends.plain.stages import Averaged, Sharded
from ladder.machine.machine_speed import MachineSpeed
from ladder.step.assignment import Assignment
from ladder.step.clock import StepParts
from ladder.step.gathering import Gathering
from ladder.step.host import parameters_of
from ladder.step.ledger import Ledger
from ladder.step.stage import Stage
from ladder.workload.workload import Workload


class Wrapped(Assignment):
    """What the ranks of DDP or FSDP2 do."""

    @property
    def autocasts(self) -> bool:
        """Those of DDP; FSDP2 gathers them in 16 bits."""
        return self.stage == 0 and self.stored_width > self.width

    @property
    def trained(self) -> int:
        return trained_in_32_bits(self.workload)

    @property
    def stored(self) -> float:
        return weights_bytes(self.workload, self.stored_width)

    @property
    def state_bytes(self) -> float:
        return self.workload.state_bytes(self.stored_width) * self.effects.moment_bytes / self.effects.master_bytes

    @property
    def stored_width(self) -> float:
        """Bytes of a trained weight between steps."""
        return 2.0 if self.stage == 0 and self.workload.trains_16_bits else 4.0

    @property
    def passes(self) -> float:
        """How often a micro-step gathers weights."""
        return {0: 0.0, 2: 1.0, 3: 2.0}[self.stage]

    def pinned(self) -> Iterator[float]:
        """FSDP2's CPUOffloadPolicy: each parameter's fp32 shard, and its gradient, which is copied to pinned memory."""
        if self.parameter_device == "cpu":
            for elements in parameters_of(self):
                yield from [4.0 * elements / self.ranks] * 2

    def pageable(self) -> float:
        return self.state_bytes * self.share if self.parameter_device == "cpu" else 0.0

    @property
    def loaded(self) -> float:
        """With FSDP2 each rank of a training reads all weights before they are divided; packed ones on its GPU.

        Seen with transformers 5.23, also where accelerate then sends them from rank 0; trials make random ones on rank
        0 alone.
        """
        is_read = self.stage > 0 and not self.workload.weights.quantised
        return weights_bytes(self.workload) if is_read else 0.0

    def time_on(self, machine: MachineSpeed) -> StepParts:
        return wrapped_time(self, machine)

    def stage_on(self, ledger: Ledger) -> Stage:
        return (Sharded if self.stage else Averaged)(self, ledger)

    @cached_property
    def gathering(self) -> Gathering:
        key = ("gathering", self.candidate.engine.rung, self.ranks)
        return self.workload.remembered(key, lambda: units_gathered(self))


def weights_bytes(workload: Workload, width: float = 4.0) -> float:
    """Bytes of all weights: of `width` each, and beside adapters only these."""
    weights = workload.weights
    if workload.lora is None:
        return width * weights.total
    return weights.bytes_held + weights.bytes_widened + (width - workload.width) * (weights.trained - weights.copied)


def trained_in_32_bits(workload: Workload) -> int:
    """Trained elements; two of peft's copies in 16 bits, with their gradients and moments, count as one."""
    return workload.weights.trained - workload.weights.copied // 2
