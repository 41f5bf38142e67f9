"""What DDP and FSDP2 allocate at the start, for gradients in backward, and in the step.

Taken from torch 2.13: csrc/distributed/c10d/reducer.cpp for DDP, distributed/fsdp/_fully_shard for FSDP2, with the
arguments that accelerate 1.15 gives them: 16-bit parameters and 16-bit reduction, and a unit for each block, for the
embeddings, and for the head with the last norm.
"""

from __future__ import annotations

from ladder.simulation.allocation import Ledger
from ladder.simulation.assignment import Assignment
from ladder.simulation.zero_stages import Stage


class _Plain(Stage):
    def __init__(self, assignment: Assignment, ledger: Ledger) -> None:
        super().__init__(assignment, ledger)
        self._ranks = assignment.owners if assignment.stage else 1
        """Over how many the weights are divided."""

    def settle(self) -> None:
        self._take_moments(-(-self._assignment.trained // self._ranks))
        if self._assignment.accumulates:
            self._ledger.take("accumulated", self._assignment.gradient_bytes * self._assignment.trained)

    def update(self) -> None:
        """Clipping multiplies gradients in place, and the fused AdamW needs no copies."""
        self._ledger.give("accumulated")
        self._ledger.give("gradients")


class Averaged(_Plain):
    """DDP: everything on each rank. Its reducer copies fp32 gradients into buckets that stay from the start."""

    def start(self) -> None:
        self._ledger.take("parameters", self._assignment.stored)
        if self._ranks_beside:
            self._ledger.take("buckets", 4.0 * self._assignment.trained)

    @property
    def _ranks_beside(self) -> bool:
        return self._assignment.ranks > 1

    def gradient(self, elements: int) -> None:
        """The gradient of the 16-bit copy, which autocast's backward casts to fp32."""
        self._ledger.take("of the copy", 2.0 * elements)
        if self._assignment.accumulates:
            self._ledger.touch(4.0 * elements)  # it is added to the accumulated one
        else:
            self._ledger.take("gradients", 4.0 * elements)
        self._ledger.give("of the copy")

    def end_of_backward(self) -> None:
        """finalize_backward copies the averages from the buckets into the gradients that are already there."""


class Sharded(_Plain):
    """FSDP2: fp32 shards. A unit's gradients stay whole in 16 bits until it is reduced, in the last micro-step."""

    def __init__(self, assignment: Assignment, ledger: Ledger) -> None:
        super().__init__(assignment, ledger)
        self._unit = 0
        """Elements of the gradients of the unit that backward is in."""
        self._left = assignment.trained
        """Elements whose accumulated gradients are not reduced yet."""

    def start(self) -> None:
        """fully_shard moves a unit to the GPU before it is divided, and offloaded shards back."""
        network = self._assignment.network
        largest = max(
            network.table, network.head, *(sum(each.elements for each in b.operations) for b in network.blocks)
        )
        self._ledger.touch(4.0 * largest)
        if self._on_gpu:
            self._ledger.take("parameters", self._assignment.stored / self._ranks)

    def gradient(self, elements: int) -> None:
        self._unit += elements
        if self._assignment.accumulates:
            self._ledger.touch(2.0 * elements)
        else:
            self._ledger.take("of the unit", 2.0 * elements)

    def end_of_unit(self) -> None:
        """post_backward: the last unit's input of the reduce-scatter is kept until here; its output is cast to fp32."""
        ledger, elements = self._ledger, self._unit
        if not elements:
            return
        ledger.give("input")
        ledger.take("input", 2.0 * elements, "buffers")
        ledger.give("of the unit")
        if self._assignment.accumulates:
            self._left = max(0, self._left - elements)
            ledger.set("accumulated", 2.0 * self._left)
        ledger.take("output", 2.0 * elements / self._ranks, "buffers")
        if self._on_gpu:
            ledger.take("gradients", 4.0 * elements / self._ranks)
        else:
            ledger.touch(4.0 * elements / self._ranks)
        ledger.give("output")
        self._unit = 0

    def end_of_backward(self) -> None:
        self._ledger.give("input")
