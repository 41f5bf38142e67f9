"""The operations of a model with fp32 weights under autocast, as DDP trains it: what is kept and cast besides.

From torch's autocast: products cast their inputs, each for itself, and their trained matrices, once in a forward pass;
norms and sums with fp32 values stay in fp32. The embeddings are fp32, so the residual stream is too. Frozen weights
beside adapters are in 16 bits, with a 16-bit stream, and only adapters are cast: peft passes them fp32 inputs. Where
peft has made frozen weights fp32, so is the stream, and packed layers return the type of what they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ladder.candidates import Effects
from ladder.step.operation import Block, Operation
from ladder.workload.workload import Workload


class Autocast:
    """Changes the operations of a workload's blocks."""

    def __init__(self, workload: Workload, effects: Effects) -> None:
        self._whole, self._effects, self._prepared = workload.lora is None, effects, workload.prepare_kbit
        self._gated = workload.model.gated_mlp or workload.model.is_encoder_decoder
        self._layers = [each for each in workload.model.modules if each.layer == 0 and each.reads]

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """The same blocks under autocast; equal ones are one object."""
        known = {block: replace(block, operations=self._operations(block)) for block in set(blocks)}
        return tuple(known[block] for block in blocks)

    def _operations(self, block: Block) -> tuple[Operation, ...]:
        seen, changed = set[str](), list[Operation]()
        for each in block.operations:
            is_fused = each.reads in seen and sum(matrix.reads == each.reads for matrix in self._layers) == 1
            changed.append(self.operation(each, shares_its_input=is_fused))
            seen.add(each.reads)
        return tuple(changed)

    def operation(self, operation: Operation, *, shares_its_input: bool = False) -> Operation:
        """`operation` under autocast."""
        if not self._whole:
            operation = self._beside_frozen(operation)
            return self._beside_packed(operation) if self._prepared else operation
        if operation.weight[0]:
            operation = replace(operation, casts=operation.weight[0] * operation.weight[1])
            if operation.reads in ("a", "n"):
                return operation if shares_its_input else self._of_a_norm(operation)
            return replace(operation, scratch=operation.scratch + 2.0 * operation.weight[1])
        return self._norm(operation) if operation.name.endswith("norm") and operation.others else operation

    def _of_a_norm(self, operation: Operation) -> Operation:
        """A product that reads a norm's fp32 output, of which it saves a 16-bit copy."""
        inputs = operation.weight[0]
        merged = 2.0 * inputs if operation.ends > 2.0 * operation.weight[1] else 0.0
        return replace(
            operation,
            saves=max(operation.saves, 2.0 * inputs),
            makes=operation.makes + 4.0 * inputs,
            ends=operation.ends + 2.0 * inputs + merged,
        )

    def _norm(self, norm: Operation) -> Operation:
        """Input, normalised values and output in fp32, except for norms of queries and keys, which read 16 bits."""
        if norm.name.startswith(("queries", "keys")):
            return norm
        width = norm.makes / 2.0
        python = self._is_in_python
        return replace(
            norm,
            saves=8.0 * width if python else 2.0 * norm.saves,
            makes=2.0 * norm.makes,
            ends=2.0 * norm.ends,
            scratch=norm.scratch + 2.0 * width,
        )

    @property
    def _is_in_python(self) -> bool:
        """Whether norms are Python code, which computes in fp32 anyhow, and no kernel."""
        return self._gated and self._effects.norm_keeps == 1.0

    def _beside_packed(self, operation: Operation) -> Operation:
        """Values in fp32, but for attention, whose inputs and output autocast gives 16 bits."""
        is_norm = operation.name.endswith("norm") and not self._is_in_python
        return replace(
            operation,
            saves=operation.saves * (2.0 if is_norm or operation.name in ("activation", "gating") else 1.0),
            stays=operation.stays * (1.0 if operation.reads == "q" else 2.0),
            makes=2.0 * operation.makes,
            ends=2.0 * operation.ends,
        )

    def _beside_frozen(self, operation: Operation) -> Operation:
        """Adapters have fp32 weights: their input is cast to fp32 and back, and each saves a copy of its own."""
        inputs, outputs = operation.weight
        if operation.name == "adapter A":
            return replace(
                operation,
                casts=inputs * outputs,
                saves=operation.saves + 2.0 * inputs,
                scratch=operation.scratch + 4.0 * inputs,
            )
        if operation.name == "adapter B":
            return replace(operation, casts=inputs * outputs)
        if inputs and not operation.trained:
            return replace(operation, saves=max(0.0, operation.saves - operation.for_weight))
        return operation
