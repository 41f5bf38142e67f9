"""The memory of a simulated rank: one micro-step, allocation by allocation, with the hooks of a ZeRO stage.

`walk_memory` starts the engine, runs the last micro-step of an optimizer step (with gradients of earlier ones) and the
optimizer, and reads the ledger's peak. Tensors are allocated and freed in the order of autograd, transformers' loss and
DeepSpeed 0.19.8; benchmarks/physics.py compares the result with recorded sweeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from ladder.simulation.allocation import Ledger
from ladder.simulation.assignment import Assignment
from ladder.simulation.gathering import Gathering
from ladder.simulation.kernel_time import chunk_rows
from ladder.simulation.operation import Operation
from ladder.simulation.zero_stages import Stage
from ladder.units import MIB

_WORKSPACE = 64 * MIB
"""cuBLAS's workspace on Hopper (derived: torch's default of 32 MiB for each of forward's and backward's handles)."""


@dataclass(frozen=True)
class MemoryWalk:
    """The result of a walk, in bytes."""

    at_start: int
    peak: int
    moment: str


def walk_memory(assignment: Assignment, gathering: Gathering, ledger: Ledger) -> MemoryWalk:
    """Walk from the first parameter to the end of an optimizer step."""
    stage = assignment.stage_on(ledger)
    stage.start()
    at_start = ledger.peak
    ledger.take("workspace", _WORKSPACE, "buffers")
    stage.settle()
    ledger.forget()
    _MicroStep(assignment, gathering, ledger, stage).run()
    ledger.moment = "step"
    stage.update()
    return MemoryWalk(at_start=at_start, peak=ledger.peak, moment=ledger.fullest)


class _MicroStep:
    """Forward, loss and backward of the last micro-step of an optimizer step."""

    def __init__(self, assignment: Assignment, gathering: Gathering, ledger: Ledger, stage: Stage) -> None:
        self._assignment, self._gathering, self._ledger, self._stage = assignment, gathering, ledger, stage
        self._model, self._tokens, self._network = assignment.workload.model, assignment.tokens, assignment.network
        self._narrow = 2.0 * self._tokens * self._model.hidden_size
        """Bytes of the tokens' hidden values in 16 bits."""
        self._stream = assignment.stream_bytes * self._tokens * self._model.hidden_size
        """The same on the residual stream."""
        self._kind = "recomputed" if assignment.candidate.checkpoint_every else "activations"
        """Of what is saved outside layers."""

    def run(self) -> None:
        layers = self._model.num_layers
        self._enter(0, "forward")
        self._ledger.take("stream", self._stream, self._kind)
        for layer in range(layers):
            self._enter(1 + layer, "forward")
            self._forward(layer)
        self._enter(layers + 1, "forward")
        self._head()
        for layer in reversed(range(layers)):
            if self._network.blocks[layer].reached:
                self._enter(2 * layers + 1 - layer, "backward")
                self._backward(layer)
        self._enter(2 * layers + 2, "backward")
        self._embeddings_backward()

    def _enter(self, segment: int, moment: str) -> None:
        """Begin a segment of the micro-step, with the parameters that stage 3 has gathered in it."""
        self._ledger.moment = moment
        self._ledger.set("gathered", 2.0 * self._gathering.live[segment], "live")

    def _kind_of(self, layer: int) -> str:
        """Half checkpointing leaves every second layer as it is without checkpointing."""
        return "recomputed" if self._assignment.recomputes(layer) else "activations"

    def _forward(self, layer: int) -> None:
        block, kind = self._network.blocks[layer], self._kind_of(layer)
        if block.reached and not self._assignment.recomputes(layer):
            self._keep(layer)
            return
        if block.reached and self._assignment.candidate.offload_activations:
            self._ledger.touch(self._stream, kind)  # while it is copied to the host
        elif block.reached:
            self._ledger.take(f"input {layer}", self._stream, kind)
        for place, operation in enumerate(block.operations):
            self._unpack(operation)
            self._cast(layer, operation)
            if block.reached and operation.stays:
                self._ledger.take(f"held {layer} {place}", self._tokens * operation.stays, "activations")
        most = max(each.saves + each.makes for each in block.operations)
        self._ledger.touch(self._tokens * most, kind)

    def _cast(self, layer: int, operation: Operation) -> None:
        """Autocast's copy of a matrix, which it keeps until the end of forward, and backward until it has used it."""
        if operation.casts:
            self._ledger.take(f"copies {layer}", 2.0 * operation.casts, "live")

    def _end_of_forward(self) -> None:
        """Autocast forgets its copies; backward needs those of layers that are not recomputed."""
        for layer in range(self._model.num_layers):
            if self._assignment.recomputes(layer) or not self._network.blocks[layer].reached:
                self._ledger.give(f"copies {layer}")

    def _unpack(self, operation: Operation) -> None:
        """A quantised matrix is written in 16 bits for each product."""
        if operation.unpacks:
            self._ledger.touch(operation.unpacks, "buffers")

    def _keep(self, layer: int) -> None:
        """Forward of a layer, saving what backward needs."""
        kind = self._kind_of(layer)
        for place, operation in enumerate(self._network.blocks[layer].operations):
            self._unpack(operation)
            self._ledger.take(f"{layer} {place}", self._tokens * operation.saves + operation.fixed, kind)
            self._cast(layer, operation)

    def _backward(self, layer: int) -> None:
        """Backward of a layer; the gradient of the residual stream passes through all layers."""
        ledger, kind = self._ledger, self._kind_of(layer)
        if self._assignment.recomputes(layer):
            if self._assignment.candidate.offload_activations:
                ledger.take(f"input {layer}", self._stream, kind)
            self._keep(layer)
        gradients = 0.0
        for place, operation in reversed(list(enumerate(self._network.blocks[layer].operations))):
            if operation.in_place:
                ledger.give(f"{layer} {place}")
            gradients += self._tokens * operation.makes
            ledger.set("gradients of activations", gradients + self._tokens * operation.scratch, kind)
            self._unpack(operation)
            for elements in operation.gradients:
                self._stage.gradient(elements)
            ledger.give(f"{layer} {place}")
            ledger.give(f"held {layer} {place}")
            gradients = max(0.0, gradients - self._tokens * operation.ends)
            ledger.set("gradients of activations", gradients, kind)
        ledger.give(f"input {layer}")
        ledger.give(f"copies {layer}")
        self._stage.end_of_unit()

    def _head(self) -> None:
        """The final norm, logits and loss with their backward, after which only the stream's gradient is left."""
        ledger, norm, head = self._ledger, self._network.last_norm, self._network.trained_head
        if self._assignment.autocasts and (head or self._assignment.workload.prepare_kbit):
            ledger.take("copy of the head", 2.0 * self._network.head, "live")
        ledger.take("final norm", self._tokens * norm.saves + (self._narrow if head else 0.0), self._kind)
        if self._assignment.effects.chunked_loss:
            self._chunked_loss()
        else:
            self._whole_loss()
        ledger.take("gradient of the stream", self._stream, self._kind)
        ledger.touch(self._tokens * norm.scratch, self._kind)
        ledger.give("final norm")
        ledger.give("copy of the head")
        ledger.give("stream")
        if head and not self._model.tied:
            self._stage.gradient(head)
        for elements in norm.gradients:
            self._stage.gradient(elements)
        if not self._model.tied:
            self._stage.end_of_unit()

    def _whole_loss(self) -> None:
        """ForCausalLMLoss: 16-bit logits, their copy in fp32, log-softmax; in backward three gradients, one by one.

        Most other models compute their loss in 16 bits, without the copy.
        """
        ledger, logits = self._ledger, float(self._tokens * self._model.vocab_size)
        wide = self._model.has_wide_loss
        ledger.take("logits", 2 * logits, "logits")
        ledger.moment = "loss"
        ledger.take("logits in fp32", 4 * logits * wide, "logits")
        ledger.take("log-softmax", (4 if wide else 2) * logits, "logits")
        ledger.give("logits in fp32")
        ledger.give("logits")
        self._end_of_forward()
        ledger.take("gradient of the loss", (4 if wide else 2) * logits, "logits")
        ledger.take("gradient in fp32", 4 * logits * wide, "logits")
        ledger.give("gradient of the loss")
        ledger.give("log-softmax")
        ledger.moment = "backward"
        ledger.take("gradient of the logits", 2 * logits, "logits")
        ledger.give("gradient in fp32")
        self._head_gradient()
        ledger.touch(self._narrow, self._kind)
        ledger.give("gradient of the logits")

    def _chunked_loss(self) -> None:
        """A chunked loss: each chunk's gradient overwrites its logits, and is added to the head's gradient."""
        ledger, model = self._ledger, self._model
        rows = chunk_rows(self._tokens, model)
        ledger.moment = "loss"
        ledger.take("gradient of the final norm", self._narrow, "logits")
        self._head_gradient()
        ledger.take("chunk", 2.0 * rows * model.vocab_size, "logits")
        if self._network.trained_head:
            ledger.touch(2.0 * model.vocab_size * model.hidden_size, "logits")
        ledger.give("chunk")
        self._end_of_forward()
        ledger.moment = "backward"
        ledger.give("gradient of the final norm")

    def _head_gradient(self) -> None:
        """The head's gradient comes before the layers'; a tied head's waits for that of the embeddings."""
        if not self._network.trained_head:
            return
        self._ledger.take(
            "gradient of the head", self._assignment.gradient_bytes * self._network.trained_head, "states"
        )
        if not self._model.tied:
            self._ledger.give("gradient of the head")  # the stage allocates it immediately afterwards

    def _embeddings_backward(self) -> None:
        self._ledger.give("gradient of the stream")
        table = self._network.trained_table
        if table:
            self._ledger.take("gradient of the table", self._assignment.gradient_bytes * table, "states")
        self._ledger.give("gradient of the head")
        self._ledger.give("gradient of the table")
        if table:
            self._stage.gradient(table)
        self._stage.end_of_unit()
        self._stage.end_of_backward()
