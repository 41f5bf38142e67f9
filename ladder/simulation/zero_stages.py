"""What DeepSpeed's stages allocate at the start, for gradients in backward, and in the step.

Taken from DeepSpeed 0.19.8: runtime/fp16/unfused_optimizer.py for stage 0, runtime/zero/stage_1_and_2.py and stage3.py
for the others; comments name the functions. The last rank is simulated: it owns the end of the model, whose gradients
come first, when most activations still exist.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ladder.simulation.allocation import Ledger
from ladder.simulation.assignment import Assignment

_UNFUSED_BUCKET = 500_000_000
"""Elements; defined in runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE."""
_NORM_PIECE = 250_000_000
"""Elements; defined in stage3._constant_buffered_norm2."""


class Stage(ABC):
    """The hooks of one ZeRO stage on one rank."""

    def __init__(self, assignment: Assignment, ledger: Ledger) -> None:
        self._assignment, self._ledger = assignment, ledger
        self._effects = assignment.effects
        self._on_gpu = assignment.optimizer_device == "none"

    @abstractmethod
    def start(self) -> None:
        """Allocate what the engine has before its first step."""

    @abstractmethod
    def settle(self) -> None:
        """Allocate what remains from earlier steps, and from earlier micro-steps of this step."""

    @abstractmethod
    def gradient(self, elements: int) -> None:
        """Backward has computed the gradient of a parameter."""

    def end_of_unit(self) -> None:  # noqa: B027 - DeepSpeed has no such units, so its stages do nothing here
        """Backward has left a block, the head, or the embeddings."""

    @abstractmethod
    def end_of_backward(self) -> None:
        """All gradients are complete."""

    @abstractmethod
    def update(self) -> None:
        """Run the optimizer."""

    def _largest_matrix(self) -> int:
        """Elements of the largest matrix of a block that is trained."""
        blocks = self._assignment.network.blocks
        return max(sum(each.gradients) for block in set(blocks) for each in block.operations)

    def _take_moments(self, elements: int) -> None:
        """Allocate Adam's moments, which it creates in the first step."""
        if self._on_gpu:
            self._ledger.take("moments", self._assignment.moments * self._effects.moment_bytes * elements)


class Replicated(Stage):
    """Stage 0: everything on each rank."""

    def start(self) -> None:
        """initialize_optimizer_states runs a whole step with zero gradients in 16 and 32 bits."""
        ledger, elements = self._ledger, self._assignment.trained
        ledger.take("parameters", self._assignment.held)
        ledger.take("master", self._effects.master_bytes * elements)
        ledger.take("zeros", (2.0 + self._effects.gradient_bytes) * elements)
        self._take_moments(elements)
        ledger.give("zeros")

    def settle(self) -> None:
        if self._assignment.accumulates:
            self._ledger.take("gradients", 2.0 * self._assignment.trained)

    def gradient(self, elements: int) -> None:
        if self._assignment.accumulates:
            self._ledger.touch(2.0 * elements)  # it is added to the accumulated one
        else:
            self._ledger.take("gradients", 2.0 * elements)

    def end_of_backward(self) -> None:
        if self._assignment.ranks > 1:  # engine.buffered_allreduce_fallback flattens them bucket by bucket
            self._ledger.touch(2.0 * min(_UNFUSED_BUCKET, self._assignment.trained), "buffers")

    def update(self) -> None:
        self._ledger.take("gradients in fp32", self._effects.gradient_bytes * self._assignment.trained)
        self._ledger.give("gradients in fp32")
        self._ledger.give("gradients")


class Partitioned(Stage):
    """Stages 1 and 2: parameters on each rank; the optimizer, and at stage 2 the gradients, are divided."""

    def __init__(self, assignment: Assignment, ledger: Ledger) -> None:
        super().__init__(assignment, ledger)
        self._filled = 0
        self._has_buckets = False
        """True from the first gradient on; stage 1 keeps buckets between micro-steps."""
        self._passed = 0
        """Elements whose gradients are reduced, from the end of the model."""
        self._left = 0
        """Elements whose gradients are complete or accumulated at stage 1, and not in a bucket yet."""
        self._late: list[int] = []
        """Elements of the gradients that are reduced when backward is over."""
        self._largest = assignment.network.largest_gradient
        self._keeps_all = assignment.stage == 1
        self._is_late = self._keeps_all and not assignment.knobs["overlap_comm"]

    def start(self) -> None:
        share, ledger = self._assignment.share, self._ledger
        ledger.take("parameters", self._assignment.held)
        ledger.touch(2.0 * share)  # the clone of its partition, before it is converted to fp32
        if self._on_gpu:
            ledger.take("master", self._effects.master_bytes * share)
            ledger.touch(self._effects.master_bytes * share)  # initialize_optimizer_states: a zero gradient
        else:
            ledger.take("temp_grad_buffer_for_gpu_offload", 2.0 * self._largest, "buffers")

    def settle(self) -> None:
        self._take_moments(self._assignment.share)
        if not self._assignment.accumulates:
            return
        if self._keeps_all:
            self._left = self._assignment.trained
            self._ledger.take("accumulated", 2.0 * self._left)
            self._setup_buckets()  # created by the first hook, freed only at the end of the last micro-step
        elif self._on_gpu:
            self._ledger.take("accumulated", 2.0 * self._assignment.share)

    def _setup_buckets(self) -> None:
        if not self._has_buckets:
            number = 2 if self._assignment.knobs["overlap_comm"] else 1
            self._ledger.take("buckets", 2.0 * self._assignment.bucket * number, "buffers")
            self._has_buckets = True

    def gradient(self, elements: int) -> None:
        """process_gradients: at once, except at stage 1 without overlap."""
        self._setup_buckets()
        if not self._is_late:
            self._add(elements)
            return
        self._late.append(elements)
        if self._assignment.accumulates:
            self._ledger.touch(2.0 * elements)
        else:
            self._left += elements
            self._ledger.set("accumulated", 2.0 * self._left)

    def _add(self, elements: int) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: into the bucket, or by itself if it is larger."""
        if self._filled + elements > self._assignment.bucket:
            self._reduce()
        if self._is_late or (self._keeps_all and self._assignment.accumulates):
            # It is added to the accumulated one, which is freed when the gradient becomes a view of the bucket.
            self._ledger.touch(2.0 * elements)
            self._left = max(0, self._left - elements)
            self._ledger.set("accumulated", 2.0 * self._left)
        elif elements > self._assignment.bucket:
            self._ledger.take("larger than the bucket", 2.0 * elements)
        else:
            self._ledger.touch(2.0 * elements)
        self._filled += elements

    def _reduce(self) -> None:
        """average_tensor and later: a copy if the bucket belongs to several ranks, then the rank's own part is kept."""
        assignment, ledger = self._assignment, self._ledger
        if not self._filled:
            return
        if self._straddles():
            ledger.touch(2.0 * self._filled, "buffers")  # allreduce_bucket flattens the slices
        if assignment.optimizer_device != "none":
            self._to_host(self._filled)
        elif self._passed < assignment.share:
            ledger.set("grads_in_partition", 2.0 * assignment.share)
        ledger.give("larger than the bucket")
        self._passed, self._filled = self._passed + self._filled, 0

    def _straddles(self) -> bool:
        """Whether the bucket has gradients of several ranks; with round robin, each parameter has another owner."""
        share, until = self._assignment.share, self._passed + self._filled
        if self._assignment.ranks == 1:
            return False
        return bool(self._assignment.knobs["round_robin_gradients"]) or self._passed // share != (until - 1) // share

    def _to_host(self, elements: int) -> None:
        """set_norm_for_param_grad_in_gpu in fp64, then the copy in fp32, one parameter after another."""
        largest = elements if elements > self._assignment.bucket else min(elements, self._largest_matrix())
        own = min(largest, self._assignment.share)
        self._ledger.touch(8.0 * own, "buffers")
        self._ledger.touch(4.0 * own, "buffers")

    def end_of_backward(self) -> None:
        late, self._late = self._late, []
        for elements in late:
            self._add(elements)
        self._reduce()
        self._ledger.give("buckets")

    def update(self) -> None:
        """step: flattened gradients, a copy in fp32, the optimizer; then they are freed."""
        ledger, share = self._ledger, self._assignment.share
        if self._assignment.accumulates and not self._keeps_all:
            ledger.give("grads_in_partition")  # it was added to the accumulated gradients
        if self._on_gpu:
            ledger.take("flat", 2.0 * share)
            ledger.take("gradients in fp32", self._effects.gradient_bytes * share)
        for name in ("accumulated", "flat", "gradients in fp32", "grads_in_partition"):
            ledger.give(name)


class Divided(Stage):
    """Stage 3: parameters, gradients and optimizer divided."""

    def __init__(self, assignment: Assignment, ledger: Ledger) -> None:
        super().__init__(assignment, ledger)
        self._filled = self._number = self._largest_waiting = 0
        """Elements in the bucket, the number of their parameters, and elements of the largest of these."""

    def start(self) -> None:
        share, ledger = self._assignment.share, self._ledger
        if self._assignment.workload.load_in is not None:
            ledger.touch(self._assignment.held)  # quantised before they are divided
        if self._assignment.parameter_device == "none":
            ledger.take("partitions", self._assignment.held_share)
        if self._effects.copied_in_node:  # _partition_param_sec
            ledger.take("copies", self._assignment.held / self._assignment.group)
        if self._on_gpu:
            ledger.take("master", self._effects.master_bytes * share)
            # initialize_optimizer_states: a zero gradient of the size of the rank's part of the largest sub-group.
            ledger.touch(self._effects.master_bytes * self._group())
        ledger.take("bucket", 2.0 * self._assignment.bucket, "buffers")
        if self._on_gpu:
            ledger.take("gradients", 2.0 * share)

    def _group(self) -> int:
        """Elements of a sub-group: parameters are added until it is full, so the last one exceeds its size."""
        size = int(self._assignment.knobs["sub_group_size"])
        return min(self._assignment.share, size + self._largest_matrix() // self._assignment.ranks)

    def settle(self) -> None:
        self._take_moments(self._assignment.share)

    def gradient(self, elements: int) -> None:
        if self._filled and self._filled + elements > self._assignment.bucket:
            self._reduce()
        if elements > self._assignment.bucket:
            self._ledger.take("larger than the bucket", 2.0 * elements)
        else:
            self._ledger.touch(2.0 * elements)
        self._filled, self._number = self._filled + elements, self._number + 1
        self._largest_waiting = max(self._largest_waiting, elements)

    def _reduce(self) -> None:
        """reduce_scatter_coalesced joins several tensors, but not a single one; then partition_grads."""
        if not self._filled:
            return
        ledger = self._ledger
        if self._number > 1:
            ledger.take("joined", 2.0 * self._filled, "buffers")
        if not self._on_gpu:
            # _offload_grad_partition_at_boundary: one by one, the norm in fp64 and a copy in fp32 on the GPU.
            largest = self._largest_waiting / self._assignment.ranks
            ledger.take("partition", 2.0 * largest, "buffers")
            ledger.touch(8.0 * min(largest, _NORM_PIECE), "buffers")
            ledger.touch(4.0 * largest, "buffers")
            ledger.give("partition")
        ledger.give("joined")
        ledger.give("larger than the bucket")
        self._filled = self._number = self._largest_waiting = 0

    def end_of_backward(self) -> None:
        self._reduce()

    def update(self) -> None:
        """Sub-group by sub-group: _prepare_fp32_grad_for_sub_group flattens, then casts."""
        self._ledger.give("gathered")
        if self._on_gpu:
            self._ledger.take("flat", 2.0 * self._group())
            self._ledger.take("gradients in fp32", self._effects.gradient_bytes * self._group())
            self._ledger.give("flat")
            self._ledger.give("gradients in fp32")
