"""What DeepSpeed's stages allocate at the start, for gradients in backward, and in the step.

Taken from DeepSpeed 0.19.8: runtime/fp16/unfused_optimizer.py for stage 0, runtime/zero/stage_1_and_2.py and stage3.py
for the others; comments name the functions. The last rank is walked through: it owns the end of the model, whose
gradients come first, when most activations still exist.
"""

from __future__ import annotations

from ladder.step.assignment import Assignment
from ladder.step.ledger import Ledger
from ladder.step.operation import Block
from ladder.step.stage import Stage, WholeGradients

_UNFUSED_BUCKET = 500_000_000
"""Elements; defined in runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE."""
_NORM_PIECE = 250_000_000
"""Elements; defined in stage3._constant_buffered_norm2."""


_REDUCTIONS = 2
"""After so many, nothing new happens: they have had all buffers, and met a block at its fullest. Chosen: what is found
so is within 0.3 % of a walk through all blocks."""


class _Zero(Stage):
    def __init__(self, assignment: Assignment, ledger: Ledger) -> None:
        super().__init__(assignment, ledger)
        self._width = assignment.width

    def _largest_matrix(self) -> int:
        """Elements of the largest matrix of a block that is trained."""
        blocks = self._assignment.network.blocks
        return max(sum(each.gradients) for block in set(blocks) for each in block.operations)


def _filled_by(block: Block, filled: int, bucket: int) -> tuple[int, int]:
    """Elements that leave a bucket, and those in it, after the gradients of `block` went into it, `filled` before."""
    reduced = 0
    for elements in block.gradients:
        if filled + elements > bucket:
            reduced, filled = reduced + filled, 0
        filled += elements
    return reduced, filled


def _loaded(assignment: Assignment) -> float:
    """Bytes of all parameters before the engine has cast to 16 bits what peft may have made fp32."""
    return assignment.held + assignment.workload.weights.bytes_widened


class Replicated(WholeGradients, _Zero):
    """Stage 0: everything on each rank."""

    def start(self) -> None:
        """initialize_optimizer_states runs a whole step with zero gradients in 16 and 32 bits."""
        ledger, elements, assignment = self._ledger, self._assignment.trained, self._assignment
        ledger.take("parameters", _loaded(assignment), "parameters")
        ledger.set("parameters", assignment.held, "parameters")
        ledger.take("master", assignment.master_bytes * elements, "optimizer")
        ledger.take("zeros", (self._width + assignment.copied_gradient_bytes) * elements, "gradients")
        self._take_states(elements)
        ledger.give("zeros")

    def settle(self) -> None:
        """Nothing more: it has made a whole step already."""

    def accumulated(self) -> None:
        if self._assignment.accumulates:
            self._ledger.take("gradients", self._width * self._assignment.trained, "gradients")

    def end_of_backward(self) -> None:
        if self._assignment.ranks > 1:  # engine.buffered_allreduce_fallback flattens them bucket by bucket
            self._ledger.touch(self._width * min(_UNFUSED_BUCKET, self._assignment.trained), "buffers")

    def update(self) -> None:
        copied = self._assignment.copied_gradient_bytes * self._assignment.trained
        self._ledger.take("gradients in fp32", copied, "gradients")
        self._ledger.give("gradients in fp32")
        self._ledger.give("gradients")


class Partitioned(_Zero):
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
        self._reductions, self._has_straddled, self._knows_part = 0, False, False

    def start(self) -> None:
        share, ledger, master = self._assignment.share, self._ledger, self._assignment.master_bytes
        ledger.take("parameters", _loaded(self._assignment), "parameters")
        ledger.set("parameters", self._assignment.held, "parameters")
        ledger.touch(self._width * share, "parameters")  # the clone of its partition, before it is converted to fp32
        if self._on_gpu:
            ledger.take("master", master * share, "optimizer")
            ledger.touch(master * share, "gradients")  # initialize_optimizer_states: a zero gradient
        else:
            ledger.take("temp_grad_buffer_for_gpu_offload", self._width * self._largest, "buffers")

    def settle(self) -> None:
        self._take_states(self._assignment.share)

    def accumulated(self) -> None:
        if not self._assignment.accumulates:
            return
        if self._keeps_all:
            self._left = self._assignment.trained
            self._ledger.take("accumulated", self._width * self._left, "gradients")
            self._setup_buckets()  # created by the first hook, freed only at the end of the last micro-step
        elif self._on_gpu:
            self._ledger.take("accumulated", self._width * self._assignment.share, "gradients")

    def _setup_buckets(self) -> None:
        if not self._has_buckets:
            number = 2 if self._assignment.knobs["overlap_comm"] else 1
            self._ledger.take("buckets", self._width * self._assignment.bucket * number, "buffers")
            self._has_buckets = True

    def gradient(self, elements: int) -> None:
        """process_gradients: at once, except at stage 1 without overlap."""
        self._setup_buckets()
        if not self._is_late:
            self._add(elements)
            return
        self._late.append(elements)
        if self._assignment.accumulates:
            self._ledger.touch(self._width * elements, "gradients")
        else:
            self._left += elements
            self._ledger.set("accumulated", self._width * self._left, "gradients")

    def knows(self, block: Block) -> bool:
        """Unless a bucket is reduced for the first time, or the first that belongs to several ranks.

        From the first one on there is the rank's own part, with which the next block is walked through.
        """
        if self._reductions and not self._knows_part:
            self._knows_part = True
            return False
        if self._is_late or self._filled + block.trained <= self._assignment.bucket:
            return True
        return self._reductions > _REDUCTIONS and (self._has_straddled or not self._straddles(block.trained))

    def skip(self, block: Block) -> None:
        if self._is_late:
            self._late += block.gradients
            self._left += 0 if self._assignment.accumulates else block.trained
        else:
            reduced, self._filled = _filled_by(block, self._filled, self._assignment.bucket)
            self._passed += reduced
            self._left = max(0, self._left - block.trained)
        if self._keeps_all and self._left:
            self._ledger.set("accumulated", self._width * self._left, "gradients")

    def _add(self, elements: int) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: into the bucket, or by itself if it is larger."""
        if self._filled + elements > self._assignment.bucket:
            self._reduce()
        if self._is_late or (self._keeps_all and self._assignment.accumulates):
            # It is added to the accumulated one, which is freed when the gradient becomes a view of the bucket.
            self._ledger.touch(self._width * elements, "gradients")
            self._left = max(0, self._left - elements)
            self._ledger.set("accumulated", self._width * self._left, "gradients")
            if elements > self._assignment.bucket:
                self._ledger.take("larger than the bucket", self._width * elements, "gradients")
        elif elements > self._assignment.bucket:
            self._ledger.take("larger than the bucket", self._width * elements, "gradients")
        else:
            self._ledger.touch(self._width * elements, "gradients")
        self._filled += elements

    def _reduce(self) -> None:
        """average_tensor and later: a copy if the bucket belongs to several ranks, then the rank's own part is kept."""
        assignment, ledger = self._assignment, self._ledger
        if not self._filled:
            return
        if self._straddles():
            self._has_straddled = True
            ledger.touch(self._width * self._filled, "buffers")  # allreduce_bucket flattens the slices
        if assignment.optimizer_device != "none":
            self._to_host(self._filled)
        elif self._passed < assignment.share:
            ledger.set("grads_in_partition", self._width * assignment.share, "gradients")
        self._reductions += 1
        ledger.give("larger than the bucket")
        self._passed, self._filled = self._passed + self._filled, 0

    def _straddles(self, more: int = 0) -> bool:
        """Whether the bucket has gradients of several ranks; with round robin, each parameter has another owner.

        `more`: with so many elements.
        """
        share, until = self._assignment.share, self._passed + self._filled + more
        if self._assignment.ranks == 1:
            return False
        return bool(self._assignment.knobs["round_robin_gradients"]) or self._passed // share != (until - 1) // share

    def _to_host(self, elements: int) -> None:
        """set_norm_for_param_grad_in_gpu in fp64, then the copy in fp32, one parameter after another."""
        largest = elements if elements > self._assignment.bucket else min(elements, self._largest_matrix())
        own = min(largest, self._assignment.share)
        self._ledger.touch(8.0 * own, "buffers")

    def end_of_backward(self) -> None:
        for elements in self._late:
            self._add(elements)
            if self._reductions and (self._has_straddled or self._assignment.ranks == 1):
                break  # there is ever less from here on
        if self._late:
            self._ledger.give("accumulated")  # all of them are in buckets by now
        self._reduce()
        self._ledger.give("buckets")

    def update(self) -> None:
        """step: flattened gradients, a copy in fp32, the optimizer; then they are freed."""
        ledger, share = self._ledger, self._assignment.share
        if self._assignment.accumulates and not self._keeps_all:
            ledger.give("grads_in_partition")  # it was added to the accumulated gradients
        if self._on_gpu:
            ledger.take("flat", self._width * share, "gradients")
            ledger.take("gradients in fp32", self._assignment.copied_gradient_bytes * share, "gradients")
        for name in ("accumulated", "flat", "gradients in fp32", "grads_in_partition"):
            ledger.give(name)


class Divided(_Zero):
    """Stage 3: parameters, gradients and optimizer divided."""

    def __init__(self, assignment: Assignment, ledger: Ledger) -> None:
        super().__init__(assignment, ledger)
        self._reductions = 0
        self._filled = self._number = self._largest_waiting = 0
        """Elements in the bucket, the number of their parameters, and elements of the largest of these."""

    def start(self) -> None:
        share, ledger, assignment = self._assignment.share, self._ledger, self._assignment
        if assignment.workload.load_in is not None:
            ledger.touch(_loaded(assignment), "parameters")  # quantised before they are divided
        if assignment.parameter_device == "none":
            ledger.take("partitions", assignment.held_share, "parameters")
        if assignment.effects.copied_in_node:  # _partition_param_sec
            ledger.take("copies", assignment.held / assignment.group, "parameters")
        if self._on_gpu:
            ledger.take("master", assignment.master_bytes * share, "optimizer")
            # initialize_optimizer_states: a zero gradient of the size of the rank's part of the largest sub-group.
            ledger.touch(assignment.master_bytes * self._group(), "gradients")
        ledger.take("bucket", self._width * assignment.bucket, "buffers")
        if self._on_gpu:
            ledger.take("gradients", self._width * share, "gradients")

    def _group(self) -> int:
        """Elements of a sub-group: parameters are added until it is full, so the last one exceeds its size."""
        size = int(self._assignment.knobs["sub_group_size"])
        return min(self._assignment.share, size + self._largest_matrix() // self._assignment.ranks)

    def settle(self) -> None:
        self._take_states(self._assignment.share)

    def accumulated(self) -> None:
        """Nothing more: the rank's part of gradients is there all the time."""

    def gradient(self, elements: int) -> None:
        if self._filled and self._filled + elements > self._assignment.bucket:
            self._reduce()
            self._reductions += 1
        if elements > self._assignment.bucket:
            self._ledger.take("larger than the bucket", self._width * elements, "gradients")
        else:
            self._ledger.touch(self._width * elements, "gradients")
        self._filled, self._number = self._filled + elements, self._number + 1
        self._largest_waiting = max(self._largest_waiting, elements)

    def knows(self, block: Block) -> bool:
        return self._reductions > _REDUCTIONS or self._filled + block.trained <= self._assignment.bucket

    def skip(self, block: Block) -> None:
        reduced, self._filled = _filled_by(block, self._filled, self._assignment.bucket)
        self._number = block.num_trained + (0 if reduced else self._number)
        self._largest_waiting = max(self._largest_waiting, *block.gradients)

    def _reduce(self) -> None:
        """reduce_scatter_coalesced joins several tensors, but not a single one; then partition_grads."""
        if not self._filled:
            return
        ledger = self._ledger
        if self._number > 1:
            ledger.take("joined", self._width * self._filled, "buffers")
        if not self._on_gpu:
            # _offload_grad_partition_at_boundary: one by one, the norm in fp64 and a copy in fp32 on the GPU.
            largest = self._largest_waiting / self._assignment.ranks
            ledger.take("partition", self._width * largest, "buffers")
            ledger.touch(max(8.0 * min(largest, _NORM_PIECE), 4.0 * largest), "buffers")
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
            largest = self._assignment.network.largest_gradient / self._assignment.ranks
            self._ledger.touch(8.0 * min(largest, _NORM_PIECE), "buffers")
            group = self._group()
            self._ledger.take("flat", self._width * group, "gradients")
            self._ledger.take("gradients in fp32", self._assignment.copied_gradient_bytes * group, "gradients")
            self._ledger.give("flat")
            self._ledger.give("gradients in fp32")
