"""What DDP and FSDP2 allocate at the start, for gradients in backward, and in the step.

Taken from torch 2.13: csrc/distributed/c10d/reducer.cpp for DDP, distributed/fsdp/_fully_shard for FSDP2, with the
arguments that accelerate 1.15 gives them: 16-bit parameters and 16-bit reduction, and a unit for each block, for the
embeddings, and for the head with the last norm.
"""

from __future__ import annotations

from ladder.step.assignment import Assignment
from ladder.step.ledger import Ledger
from ladder.step.operation import Block
from ladder.step.stage import Stage, WholeGradients


class _Plain(Stage):
    def __init__(self, assignment: Assignment, ledger: Ledger) -> None:
        super().__init__(assignment, ledger)
        self._ranks = assignment.owners if assignment.stage else 1
        """Over how many the weights are divided."""
        self._width = assignment.gradient_bytes

    def settle(self) -> None:
        self._take_states(-(-self._assignment.trained // self._ranks))

    def accumulated(self) -> None:
        if self._assignment.accumulates:
            self._ledger.take("accumulated", self._width * self._assignment.trained, "gradients")

    def update(self) -> None:
        """Clipping multiplies gradients in place, and the fused AdamW needs no copies."""
        self._ledger.give("accumulated")
        self._ledger.give("gradients")


class Averaged(WholeGradients, _Plain):
    """DDP: everything on each rank. Its reducer copies fp32 gradients into buckets that stay from the start."""

    def start(self) -> None:
        self._ledger.take("parameters", self._assignment.stored, "parameters")
        if self._assignment.ranks > 1:
            self._ledger.take("buckets", self._width * self._assignment.trained, "buffers")

    def gradient(self, elements: int) -> None:
        """The gradient of the 16-bit copy, which autocast's backward casts to fp32."""
        if self._assignment.autocasts:
            self._ledger.take("of the copy", 2.0 * elements, "gradients")
        super().gradient(elements)
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
        self._input = 0
        """Elements of the unit that was reduced last."""
        self._keeps_whole = assignment.accumulates and not assignment.effects.divides_gradients
        """Whether gradients of earlier micro-steps are whole; divided ones are added to in place."""

    def start(self) -> None:
        """fully_shard moves a unit to the GPU before it is divided, and offloaded shards back."""
        network, stored = self._assignment.network, self._assignment.stored
        largest = max(
            network.table, network.head, *(sum(each.elements for each in b.operations) for b in set(network.blocks))
        )
        # Packed weights are on each GPU before they are divided.
        is_packed = self._assignment.workload.load_in is not None
        self._ledger.touch(stored if is_packed else 4.0 * largest, "parameters")
        if self._on_gpu:
            self._ledger.take("parameters", stored / self._ranks, "parameters")

    def accumulated(self) -> None:
        if self._keeps_whole:
            super().accumulated()
        elif self._assignment.accumulates and self._on_gpu:
            self._ledger.take("gradients", 4.0 * self._assignment.trained / self._ranks, "gradients")

    def gradient(self, elements: int) -> None:
        self._unit += elements
        if self._keeps_whole:
            self._ledger.touch(self._width * elements, "gradients")
        else:
            self._ledger.take("of the unit", self._width * elements, "gradients")

    def knows(self, block: Block) -> bool:
        """If the input of the reduction before was as large."""
        return self._input == block.trained

    def skip(self, block: Block) -> None:
        self._unit = 0
        self._keep_reduced(block.trained)

    def end_of_unit(self) -> None:
        """post_backward: the last unit's input of the reduce-scatter is kept until here; its output is cast to fp32."""
        ledger, elements = self._ledger, self._unit
        if not elements:
            return
        ledger.give("input")
        ledger.take("input", self._width * elements, "buffers")
        ledger.give("of the unit")
        ledger.take("output", self._width * elements / self._ranks, "buffers")
        if not self._on_gpu:
            ledger.touch(4.0 * elements / self._ranks, "gradients")
        self._keep_reduced(elements)
        ledger.give("output")
        self._unit, self._input = 0, elements

    def _keep_reduced(self, elements: int) -> None:
        """A rank's part of the gradients of a unit, in fp32, in place of those that were accumulated."""
        if self._keeps_whole:
            self._left = max(0, self._left - elements)
            self._ledger.set("accumulated", self._width * self._left, "gradients")
        if self._assignment.accumulates and not self._keeps_whole:
            self._ledger.touch(4.0 * elements / self._ranks, "gradients")
        elif self._on_gpu:
            self._ledger.take("gradients", 4.0 * elements / self._ranks, "gradients")

    def end_of_backward(self) -> None:
        self._ledger.give("input")
