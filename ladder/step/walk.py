"""The memory of a rank's step, read off a walk through its operations, allocation by allocation.

`walked` starts the engine, runs the last micro-step of an optimizer step (with gradients of earlier ones) and the
optimizer. Tensors are allocated and freed in the order of autograd, transformers' loss and the engine's hooks
(`step.stage`). Blocks that repeat are walked through until nothing new happens in them; of the others only the sum is
taken. benchmarks/physics.py and benchmarks/prior.py compare the result with what was recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ladder.step.assignment import Assignment
from ladder.step.counted import chunk_rows, has_wide_loss
from ladder.step.ledger import START, Ledger, Moment
from ladder.step.operation import Block
from ladder.step.stage import Stage
from ladder.units import MIB

_WORKSPACE = 64 * MIB
"""cuBLAS's workspace on Hopper (derived: torch's default of 32 MiB for each of forward's and backward's handles).
Measured: in every measurement, 0.065 GiB more than the model states."""


_LOGITS_ON_CPU = 4 / 3
"""What a CPU holds of logits and loss over what a GPU does: the model's own logits and their gradient too. Measured:
four dense types in bf16 and two in fp32, four stages, three ways of checkpointing (benchmarks/types_on_cpu.py). Two
mixtures of experts took 1 to 9 % more than is predicted so."""


def walked(assignment: Assignment) -> list[Moment]:
    """The moments at which memory may peak, in bytes; the first is the idle engine after its first step."""
    ledger = Ledger()
    stage = assignment.stage_on(ledger)
    ledger.begin(START)
    stage.start()
    if assignment.device == "cuda":
        ledger.take("workspace", _WORKSPACE, "buffers")
    stage.settle()
    ledger.begin("initialisation")
    stage.accumulated()
    _MicroStep(assignment, ledger, stage).run()
    ledger.begin("step")
    stage.update()
    found = ledger.moments()
    return sorted(found, key=lambda moment: moment.name != "initialisation")


def as_on_cpu(moments: Iterable[Moment], on_host: float) -> list[Moment]:
    """`moments` of a CPU rank, whose offloaded states of `on_host` bytes stay on the same device."""
    held = [
        moment if moment.name == START else replace(moment, optimizer=moment.optimizer + on_host) for moment in moments
    ]
    return [
        replace(moment, logits=moment.logits * _LOGITS_ON_CPU) if moment.name == "loss" else moment for moment in held
    ]


def kept(assignment: Assignment) -> float:
    """Bytes that all blocks keep from forward to backward: their inputs where they are checkpointed."""
    passes = [_Pass(assignment, block, layer) for layer, block in enumerate(assignment.network.blocks)]
    return sum(each.kept + each.input + each.stays for each in passes if each.is_reached)


def logits_at_once(assignment: Assignment) -> float:
    """Logits that a micro-step has at once."""
    tokens, model = assignment.tokens, assignment.workload.model
    rows = chunk_rows(tokens, model) if assignment.effects.chunked_loss else tokens
    return float(rows * model.vocab_size)


class _Pass:
    """What one block does to memory in forward, in bytes."""

    def __init__(self, assignment: Assignment, block: Block, layer: int) -> None:
        tokens, operations = assignment.tokens, block.operations
        stream = assignment.stream_bytes * tokens * assignment.workload.model.hidden_size
        self.is_reached, self.is_recomputed = block.reached, assignment.recomputes(layer)
        saved = tokens * sum(each.saves for each in operations) + sum(each.fixed for each in operations)
        first = operations[0]
        self.again = saved - (tokens * first.saves if first.saves_input else 0.0)
        """What it saves when it is recomputed: its first norm may save the input that is there."""
        is_kept = self.is_reached and not self.is_recomputed
        self.kept = saved if is_kept else 0.0
        self.input = stream if self.is_reached and self.is_recomputed else 0.0
        self.stays = tokens * sum(each.stays for each in operations) if self.input else 0.0
        self.passing = 0.0 if is_kept else tokens * max(each.saves + each.makes for each in operations)
        if assignment.candidate.offload_activations:  # its input is copied to the host
            self.input, self.passing = 0.0, max(self.passing, self.input)
        casts = 2.0 * sum(each.casts for each in operations)
        self.casts = casts if is_kept and assignment.effects.keeps_casts else 0.0
        """Copies of weights that autocast keeps until backward has used them."""
        self.casts_forward = casts - self.casts
        """Those that it forgets at the end of forward."""
        self.unpacked = max(each.unpacks for each in operations)


@dataclass(frozen=True)
class _Seen:
    """What backward of a block did to memory."""

    fullest: dict[str, float]
    """By part: what its fullest instant has more than there is afterwards."""
    most: float
    """Their sum."""


class _MicroStep:
    """Forward, loss and backward of the last micro-step of an optimizer step."""

    def __init__(self, assignment: Assignment, ledger: Ledger, stage: Stage) -> None:
        self._assignment, self._ledger, self._stage = assignment, ledger, stage
        self._model, self._tokens, self._network = assignment.workload.model, assignment.tokens, assignment.network
        self._width, self._live = assignment.width, assignment.gathering.live
        self._gathered = 0
        self._narrow = self._width * self._tokens * self._model.hidden_size
        """Bytes of the tokens' hidden values."""
        self._stream = assignment.stream_bytes * self._tokens * self._model.hidden_size
        """The same on the residual stream."""
        self._passes = self._passes_of_blocks()

    def run(self) -> None:
        self._ledger.begin("forward")
        self._gather(0)
        self._ledger.take("stream", self._stream, "activations")
        for layer, each in enumerate(self._passes):
            self._gather(1 + layer)
            self._forward(each)
        self._gather(self._model.num_layers + 1)
        self._head()
        self._backward()
        self._ledger.begin("backward")
        self._gather(2 * self._model.num_layers + 2)
        self._embeddings_backward()

    def _passes_of_blocks(self) -> list[_Pass]:
        known: dict[tuple[int, bool], _Pass] = {}
        passes = []
        for layer, block in enumerate(self._network.blocks):
            kind = (id(block), self._assignment.recomputes(layer))
            if kind not in known:
                known[kind] = _Pass(self._assignment, block, layer)
            passes.append(known[kind])
        return passes

    def _gather(self, segment: int) -> None:
        """Begin a segment of the micro-step, with the parameters that the engine has gathered in it."""
        if self._live[segment] != self._gathered:
            self._gathered = self._live[segment]
            self._ledger.set("gathered", self._width * self._gathered, "live")

    def _forward(self, each: _Pass) -> None:
        ledger = self._ledger
        if each.input:
            ledger.take("inputs", each.input, "activations")
        if each.casts or each.casts_forward:
            ledger.take("casts", each.casts, "live")
            ledger.take("casts of forward", each.casts_forward, "live")
        if each.unpacked:
            ledger.touch(each.unpacked, "buffers")
        if each.kept or each.stays:
            ledger.take("kept", each.kept + each.stays, "activations")
        if each.passing:
            ledger.touch(each.passing, "activations")

    def _backward(self) -> None:
        """Backward of all blocks; the gradient of the residual stream passes through all of them."""
        ledger, blocks = self._ledger, self._network.blocks
        seen: dict[_Pass, _Seen] = {}
        reached = [layer for layer in reversed(range(len(blocks))) if blocks[layer].reached]
        for layer in reached:
            each, block = self._passes[layer], blocks[layer]
            self._gather(2 * len(blocks) + 1 - layer)
            before = seen.get(each)
            if before is not None and layer != reached[-1] and self._stage.knows(block):
                self._leave(each, each.kept + each.stays)
                self._stage.skip(block)
                ledger.touch_all(before.fullest, before.most)
                continue
            ledger.begin("backward")
            self._through(each, block)
            fullest = ledger.excess()
            seen[each] = _Seen(fullest, sum(fullest.values()))

    def _leave(self, each: _Pass, left: float) -> None:
        """Free what a block kept: what is `left` of its activations, its input, and copies of its weights."""
        if left:
            self._ledger.take("kept", -left, "activations")
        if each.input:
            self._ledger.take("inputs", -each.input, "activations")
        if each.casts:
            self._ledger.take("casts", -each.casts, "live")

    def _through(self, each: _Pass, block: Block) -> None:
        """Backward of a block, operation by operation."""
        ledger, tokens = self._ledger, self._tokens
        left = each.kept + each.stays
        if each.is_recomputed:
            if self._assignment.candidate.offload_activations:
                ledger.take("fetched", self._stream, "activations")
            ledger.take("kept", each.again, "activations")
            left += each.again
            ledger.take("casts", each.casts_forward, "live")
        gradients = 0.0
        for operation in reversed(block.operations):
            saved = tokens * operation.saves + operation.fixed
            if operation.in_place:
                ledger.take("kept", -saved, "activations")
            gradients += tokens * operation.makes
            ledger.set("gradients of activations", gradients + tokens * operation.scratch, "activations")
            if operation.unpacks:
                ledger.touch(operation.unpacks, "buffers")
            for elements in operation.gradients:
                self._stage.gradient(elements)
            if not operation.in_place:
                ledger.take("kept", -saved, "activations")
            left -= saved
            gradients = max(0.0, gradients - tokens * operation.ends)
            ledger.set("gradients of activations", gradients, "activations")
        ledger.give("fetched")
        self._leave(each, left)
        if each.is_recomputed:
            ledger.take("casts", -each.casts_forward, "live")
        self._stage.end_of_unit()

    def _head(self) -> None:
        """The final norm, logits and loss with their backward, after which only the stream's gradient is left."""
        ledger, norm, head = self._ledger, self._network.last_norm, self._network.trained_head
        if self._assignment.autocasts and (head or self._assignment.workload.prepare_kbit):
            ledger.take("copy of the head", 2.0 * self._network.head, "live")
        ledger.take("final norm", self._tokens * norm.saves + (self._narrow if head else 0.0), "activations")
        if self._assignment.effects.chunked_loss:
            self._chunked_loss()
        else:
            self._whole_loss()
        ledger.take("gradient of the stream", self._stream, "activations")
        ledger.touch(self._tokens * norm.scratch, "activations")
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
        """ForCausalLMLoss: logits, their copy in fp32, log-softmax; in backward three gradients, one by one.

        Most other models compute their loss in 16 bits, without the copy. In fp32 there is no other copy.
        """
        ledger, logits, width = self._ledger, float(self._tokens * self._model.vocab_size), self._width
        wide = 4.0 if has_wide_loss(self._assignment.workload) else 2.0
        copy = wide if wide > width else 0.0
        ledger.take("logits", width * logits, "logits")
        ledger.take("logits in fp32", copy * logits, "logits")
        ledger.take("log-softmax", wide * logits, "logits")
        ledger.begin("loss")
        ledger.give("logits in fp32")
        ledger.give("logits")
        ledger.give("casts of forward")
        ledger.take("gradient of the loss", wide * logits, "logits")
        ledger.take("gradient of the logits", wide * logits, "logits")
        ledger.give("gradient of the loss")
        ledger.give("log-softmax")
        ledger.begin("backward")
        if copy:
            ledger.take("gradient in 16 bits", width * logits, "logits")
            ledger.give("gradient of the logits")
        self._head_gradient()
        ledger.touch(self._narrow, "activations")
        ledger.give("gradient in 16 bits")
        ledger.give("gradient of the logits")

    def _chunked_loss(self) -> None:
        """A chunked loss: each chunk's gradient overwrites its logits, and is added to the head's gradient."""
        ledger, model = self._ledger, self._model
        rows = chunk_rows(self._tokens, model)
        ledger.begin("loss")
        ledger.take("gradient of the final norm", self._narrow, "logits")
        self._head_gradient()
        ledger.take("chunk", self._width * rows * model.vocab_size, "logits")
        if self._network.trained_head:
            ledger.touch(self._width * model.vocab_size * model.hidden_size, "logits")
        ledger.give("chunk")
        ledger.give("casts of forward")
        ledger.begin("backward")
        ledger.give("gradient of the final norm")

    def _head_gradient(self) -> None:
        """The head's gradient comes before the layers'; a tied head's waits for that of the embeddings."""
        head = self._network.trained_head
        if not head:
            return
        self._ledger.take("gradient of the head", self._assignment.gradient_bytes * head, "gradients")
        if not self._model.tied:
            self._ledger.give("gradient of the head")  # the stage allocates it immediately afterwards

    def _embeddings_backward(self) -> None:
        self._ledger.give("gradient of the stream")
        table = self._network.trained_table
        if table:
            self._ledger.take("gradient of the table", self._assignment.gradient_bytes * table, "gradients")
        self._ledger.give("gradient of the head")
        self._ledger.give("gradient of the table")
        if table:
            self._stage.gradient(table)
        self._stage.end_of_unit()
        self._stage.end_of_backward()
