"""Seconds of a GPU's kernels: each matrix product and each element-wise kernel, by a roofline model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ladder.step.assignment import Assignment
from ladder.step.autocast import bytes_cast
from ladder.step.counted import chunk_rows
from ladder.step.operation import Block, Operation

_TILE = (128, 256)
"""Rows and columns of a product that one multiprocessor computes at a time (CUTLASS on Ampere and Hopper)."""
_ATTENTION = 0.75
"""Speed of attention relative to matrix products. Measured: fitted to sequences of 65,536 tokens on one H200, where
attention is two thirds of the time. FlashAttention-2 reports 50 to 70 % of a GPU's peak; products reach 60 to 80 %."""
_ATTENTION_BACKWARD = 2.5
"""Matrix products of attention's backward relative to its forward: five to two (derived, Dao 2023)."""
_BACKWARD_TRAFFIC, _BACKWARD_KERNELS = 2.0, 2.0
"""Backward of an element-wise kernel relative to forward. Chosen: it reads the gradient and what was saved."""
_CASTING_KERNELS = 2.0
"""Kernels with which autocast casts a product's matrix and its input (derived: one each)."""
_UNPACKING_KERNELS = 4.0
"""Kernels that write a quantised matrix in 16 bits, with their share of bitsandbytes' Python code. Measured: fitted to
QLoRA with small micro-batches on one H200 (benchmarks/results/1xh200-adapters); two kernels do the work."""
_LOGITS_FORWARD, _LOGITS_BACKWARD, _LOGITS_CHUNKED = 6 + 12 + 4, 4 + 4 + 12 + 6, 10
"""Bytes read and written for a logit: cast, log-softmax in two passes, the pick; zeros and pick, log-softmax's
backward, cast. In chunks: written once, then read and overwritten by one kernel (the source of such a kernel)."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The speeds that one GPU reaches, per second."""

    flops: float
    """Operations of a large matrix product."""
    memory: float
    """Bytes of an element-wise kernel."""
    processors: int
    """Multiprocessors: a product runs in a whole number of waves on them."""
    smallest: float = 4e-6
    """Seconds of a kernel with next to nothing to do (measured by many: 2 to 5 microseconds)."""


@dataclass(frozen=True)
class Stretch:
    """The work of a part of the micro-step for GPU and host."""

    gpu: float
    """Seconds."""
    kernels: float
    """Kernels that the host launches."""

    def __add__(self, other: Stretch) -> Stretch:
        return Stretch(self.gpu + other.gpu, self.kernels + other.kernels)


class Kernels:
    """Seconds of the parts of an assignment's model on `chip`."""

    def __init__(self, assignment: Assignment, chip: Chip) -> None:
        self._assignment, self._chip, self._tokens = assignment, chip, assignment.tokens
        self._network, self._effects = assignment.network, assignment.effects

    def block_forward(self, block: Block) -> Stretch:
        return self._sum(block, self._forward)

    def block_backward(self, block: Block) -> Stretch:
        return self._sum(block, self._backward)

    def ends(self) -> Stretch:
        """Final norm, head and loss, forward and backward."""
        model, tokens, norm = self._assignment.workload.model, self._tokens, self._network.last_norm
        trains = self._network.trained_head > 0
        products = (3 if trains else 2) * self._product(tokens, model.hidden_size, model.vocab_size)
        logits = _LOGITS_CHUNKED if self._effects.chunked_loss else _LOGITS_FORWARD + _LOGITS_BACKWARD
        pieces = 1
        if self._effects.chunked_loss:
            pieces = -(-tokens // chunk_rows(tokens, model))
        if pieces > 1 and trains:  # each chunk sums its part of the head's gradient into the whole
            products += pieces * 6.0 * model.vocab_size * model.hidden_size / self._chip.memory
        seconds = products + logits * tokens * model.vocab_size / self._chip.memory
        return Stretch(seconds, 12.0 * pieces) + self._forward(norm) + self._backward(norm)

    def lookup(self, *, backward: bool) -> Stretch:
        """The embeddings; in backward, a gradient of the whole table."""
        moved = 4.0 * self._tokens * self._assignment.workload.model.hidden_size
        if backward:
            if not self._network.trained_table:
                return Stretch(0.0, 0.0)
            moved += 4.0 * self._network.trained_table
        return Stretch(moved / self._chip.memory, 4.0)

    def _sum(self, block: Block, pass_of: Callable[[Operation], Stretch]) -> Stretch:
        stretches = [(pass_of(each), each.beside) for each in block.operations]
        replaced = sum(each.kernels for each, beside in stretches if not beside)
        others = sum(each.kernels for each, beside in stretches if beside)
        return Stretch(sum(each.gpu for each, _ in stretches), replaced * self._effects.kernels + others)

    def _forward(self, operation: Operation) -> Stretch:
        inputs, outputs = operation.weight
        if inputs:
            seconds = self._product(self._tokens, inputs, outputs) + self._unpacking(operation)
            kernels = 1.0 + (_UNPACKING_KERNELS if operation.unpacks else 0.0)
            return Stretch(seconds, kernels) + self._casting(operation)
        attention = operation.attends * self._tokens / (_ATTENTION * self._chip.flops)
        seconds = attention + self._element_wise(operation) + self._unpacking(operation)
        return Stretch(seconds, operation.kernels)

    def _backward(self, operation: Operation) -> Stretch:
        inputs, outputs = operation.weight
        if inputs:
            to_input = self._product(self._tokens, outputs, inputs)
            to_weight = self._product(inputs, self._tokens, outputs) if operation.trained else 0.0
            kernels = 3.0 if operation.trained else 2.0
            kernels += _UNPACKING_KERNELS if operation.unpacks else 0.0
            return Stretch(to_input + to_weight + self._unpacking(operation), kernels) + self._casting(operation)
        attention = _ATTENTION_BACKWARD * operation.attends * self._tokens / (_ATTENTION * self._chip.flops)
        seconds = attention + _BACKWARD_TRAFFIC * self._element_wise(operation)
        if operation.returns is not None:
            returned = operation.returns * self._tokens
            seconds = max(returned / self._chip.memory, operation.kernels * self._chip.smallest)
        seconds += self._unpacking(operation)
        return Stretch(seconds, _BACKWARD_KERNELS * operation.kernels)

    def _casting(self, operation: Operation) -> Stretch:
        """Autocast's casts, in forward or of the gradients in backward."""
        if not operation.casts:
            return Stretch(0.0, 0.0)
        seconds = max(bytes_cast(operation, self._tokens) / self._chip.memory, _CASTING_KERNELS * self._chip.smallest)
        return Stretch(seconds, _CASTING_KERNELS)

    def _unpacking(self, operation: Operation) -> float:
        """Seconds to read a matrix as it is held, and to write its copy."""
        if not operation.unpacks:
            return 0.0
        held = operation.held * operation.weight[0] * operation.weight[1]
        return max((held + operation.unpacks) / self._chip.memory, _UNPACKING_KERNELS * self._chip.smallest)

    def _element_wise(self, operation: Operation) -> float:
        moved = operation.traffic * self._tokens * (1.0 if operation.beside else self._effects.traffic)
        return max(moved / self._chip.memory, operation.kernels * self._chip.smallest)

    def _product(self, rows: int, inner: int, columns: int) -> float:
        """A matrix product: whole waves of tiles, or the time to read and write its matrices if that is longer."""
        tiles = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
        waves = math.ceil(tiles / self._chip.processors)
        filled = rows * columns / (waves * self._chip.processors * _TILE[0] * _TILE[1])
        # With too few tiles, cuBLAS uses smaller ones or splits the inner sum, which recovers half of the loss.
        computing = 2.0 * rows * inner * columns / (self._chip.flops * (0.5 + 0.5 * min(1.0, filled)))
        moving = 2.0 * (rows * inner + inner * columns + rows * columns) / self._chip.memory
        return max(computing, moving, self._chip.smallest)
