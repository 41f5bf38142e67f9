"""Simulates the time of a step without DeepSpeed: DDP's reducer, FSDP2's hooks, and torch's fused AdamW."""

from __future__ import annotations

import math

from ladder.simulation.step_clock import StepClock
from ladder.step.operation import Block

_BUCKET = 25 * 2**20 // 4
"""Elements of a bucket of fp32 gradients (defined by DDP's `bucket_cap_mb`)."""
_UNIT_PASS = 0.7e-3
"""Host seconds of FSDP2's hooks for a unit in forward or in backward: copies, collective, events. Measured: with
opt-125m on two H200, a step of its 14 units takes 36 ms more under FSDP2 than under DDP, and 15 ms of these are the
optimizer's."""
_STEP, _STEP_OF_DIVIDED = 0.01e-3, 0.08e-3
"""Host seconds per parameter in clipping and in the optimizer; for tensors that are divided, torch dispatches in
Python. Chosen: with `_UNIT_PASS`, they explain opt-125m on two H200."""
_CLIPPING, _ADAM, _SGD = 12.0, 28.0, 12.0
"""Bytes per parameter that are read and written in fp32: the gradient for the norm, and again to scale it; then
gradient, weight and two moments, or gradient and weight."""
_COPIED, _CAST = 4.0, 6.0
"""Bytes per element that FSDP2 copies from where it gathered a unit, and to cast a rank's own part of it to 16 bits."""
_SUMMED, _SUMMED_IN_FP32 = 6.0, 12.0
"""Bytes per element to add a gradient to the sum of earlier micro-steps, in 16 bits or in fp32."""
_THROUGH_BUCKET = 16.0
"""Bytes per element that DDP copies into a bucket and back."""


class PlainClock(StepClock):
    """The times of an assignment of DDP or FSDP2."""

    def update(self) -> float:
        """Clipping and the optimizer; on the CPU for offloaded shards, whose gradients backward has copied there."""
        assignment, rig = self._assignment, self._rig
        owned = assignment.share if assignment.stage else assignment.trained
        moved = (_CLIPPING + (_ADAM if assignment.moments else _SGD)) * owned
        hooks = assignment.network.num_tensors * (_STEP_OF_DIVIDED if assignment.stage else _STEP) * rig.host
        if assignment.optimizer_device == "cpu":
            return hooks + moved / rig.dram
        return max(hooks, moved / rig.chip.memory)

    def _gradient_hook(self) -> float:
        return 0.0

    def _pass_hooks(self, block: Block | None = None) -> float:
        return _UNIT_PASS if self._assignment.stage else 0.0

    def _earliest(self, began: float) -> float:
        """A unit's transfer waits for the copy of the unit before, which is where the GPU began with that one."""
        return max(began, self._before)

    def _gather_seconds(self, elements: int, within_node: bool) -> float:
        """Offloaded shards cross the bus in fp32; they are gathered in 16 bits."""
        seconds = self._collective(2.0 * elements, within_node=within_node)
        if self._assignment.parameter_device == "cpu":
            seconds += 4.0 * elements / self._assignment.ranks / self._rig.bus
        return seconds

    def _copy_seconds(self, elements: int) -> float:
        own = _CAST * elements / self._assignment.ranks
        return (_COPIED * elements + own) / self._rig.chip.memory if self._assignment.stage else 0.0

    def _reduce(self, elements: int, *, boundary: bool) -> None:
        """DDP sends full buckets, FSDP2 each unit; before the boundary, gradients are added to a sum."""
        boundary |= self._assignment.effects.divides_gradients
        if not boundary:
            summed = _SUMMED if self._assignment.stage else _SUMMED_IN_FP32
            self._gpu += summed * elements / self._rig.chip.memory
        if not boundary or self._assignment.ranks == 1:
            return
        if self._assignment.stage:
            self._send(elements, boundary=True)
            return
        self._waiting += elements
        while self._waiting >= _BUCKET:
            self._send(_BUCKET, boundary=True)
            self._waiting -= _BUCKET

    def _send(self, elements: int, *, boundary: bool) -> None:
        """Reduce gradients beside the kernels of backward: all of them in fp32, or a unit's parts in 16 bits."""
        if not elements or not boundary or self._assignment.ranks == 1:
            return
        if self._assignment.stage:
            seconds, copied = self._scattered_seconds(elements), 4.0 * elements
        else:
            seconds, copied = 2 * self._collective(4.0 * elements), _THROUGH_BUCKET * elements
        crossing = 0.0
        if self._assignment.parameter_device == "cpu":
            crossing = 4.0 * elements / self._assignment.ranks / self._rig.bus
        self._gpu += copied / self._rig.chip.memory + self._rig.contention * seconds
        self._wire = max(self._wire, self._gpu) + seconds + crossing

    def _scattered_seconds(self, elements: int) -> float:
        """A unit's gradients in 16 bits. If nodes have the same, each rank averages its part with its fellows in turn.

        `foreach_reduce`: the all-reduce follows the reduce-scatter.
        """
        assignment, rig = self._assignment, self._rig
        if not assignment.effects.divided_in_node:
            return self._collective(2.0 * elements)
        nodes = assignment.ranks // assignment.group
        part = 2.0 * elements / assignment.group
        averaging = 2 * part * (nodes - 1) / nodes / rig.link + 2 * rig.latency * math.log2(2 * nodes)
        return self._collective(2.0 * elements, within_node=True) + averaging
