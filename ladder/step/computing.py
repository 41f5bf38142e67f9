"""The seconds of forward and backward that are the same for all backends, from what blocks were counted to do."""

from __future__ import annotations

from ladder.machine.machine_speed import MachineSpeed, attention_flops, flops_per_token, forward_flops
from ladder.step.assignment import Assignment
from ladder.step.counted import USUAL_KERNELS, chunk_rows, has_wide_loss, usual_block
from ladder.workload.trained import BYTES_OF_A_WEIGHT
from ladder.workload.workload import Workload

_MOVED_BY_LOSS, _MOVED_BY_A_NARROW_LOSS = 48.0, 20.0
"""Bytes that the loss reads and writes for each logit. Derived: the fp32 copy, the log-softmax and its gradient;
without the copy, and in 16 bits."""
_MOVED_FOR_A_BIAS = 25.0
"""Attention with a bias that is trained takes longer: for each score, as long as moving so many bytes. Measured: chosen
between T0-3B on one H100 and FLAN-T5-base on one H200 (benchmarks/results/runs)."""
_LAUNCHES_BESIDE, _LAUNCHES_OF_A_KERNEL = 0.49, 0.0048
"""Host work of a block over that for a Llama block: of its modules, and for each of its kernels. Measured: 1.8 to 2.3
ms in a micro-step of opt-125m and OPT-1.3B, whose blocks have 44 kernels, on H100 and H200, and 2.9 ms of Llama-3.2-1B
with 107 (benchmarks/results/runs and sweeps)."""
_LAUNCHES_FROM_PYTHON = 0.16
"""The same for a kernel that Python starts. Measured: 5.1 to 6.6 ms a block of Llama-3.2-1B with Liger's eight on H100
and H200 (benchmarks/results/runs and sweeps)."""

_LAUNCHED_AGAIN = 0.8
"""Launching a block's kernels for its second forward pass, with what checkpointing does, over launching a Llama block
forward and backward. Measured: 2.1 to 2.8 ms with opt-125m and Llama-3.2-1B on H200, where the CPU sets the pace."""
_RAMP_TOKENS = 200.0
"""The start and the end of kernels cost as much as this many tokens, on a GPU with 1e15 operations/s. Chosen."""
ELEMENT_WISE = 0.7
"""The share of the memory bandwidth that element-wise kernels reach. Chosen: as usual on data-centre GPUs."""
_ALIGNED, _UNALIGNED = 8, 3.5
"""Products with the head take so many times as long where the vocabulary is no multiple of 8 tokens, with which bf16
kernels load 16 bytes at once. Measured: chosen so that GPT-2 (50,257 tokens) and RoBERTa (50,265) on one H100 agree
(benchmarks/results/runs)."""
_WITH_A_MASK = 6.0
"""Attention with a mask takes so many times as long as causal attention without one: it computes twice as much, in
slower kernels. Measured: chosen between Falcon-RW-1B and Gemma-3-270m on one H200 (benchmarks/results/runs)."""
_OF_A_CHUNK = 6.0
"""Bytes per weight of the head that a chunk of the loss reads and writes. Measured: a chunk of 64 rows takes 1.4 ms on
one H100, with the 256,000 tokens of Gemma (benchmarks/results/runs)."""
_KERNELS_OF_AN_ADAPTER = 0.08
"""Kernels of an adapter, forward and backward, over those of a whole block. Derived: 10 of about 125."""
_LAUNCHES_OF_EXPERTS = 2.4
"""Launching a block with experts over launching a Llama block. Measured on one H200: 5.9 ms for Qwen3-MoE with one
sequence, where the other took 2.3 ms; chosen a little lower, since Qwen3's norms are part of that."""
_PRODUCTS_OF_EXPERTS = 1.33
"""Seconds of products of which most are experts', over the usual. Measured: 1.3 to 1.4 with a mixture of experts of 3B
on one H200, at micro-batches of 4 and 8; its small products, and routing, keep the GPU from its usual speed."""


class Computing:
    """The kernels of an assignment on a machine."""

    def __init__(self, assignment: Assignment, machine: MachineSpeed) -> None:
        self._assignment, self._machine = assignment, machine
        self._workload, self._model = assignment.workload, assignment.workload.model
        self._checkpointed = assignment.candidate.checkpointed
        self._products = (machine.flops_32 if self._workload.dtype == "fp32" else machine.flops) * machine.achievable
        """Operations a second of the matrix products of training; in fp32 without TF32, as torch has it by default."""
        self._moves = ELEMENT_WISE * machine.device_bytes

    def of_a_token(self, traffic: float = 1.0) -> float:
        """Seconds of a token on one rank: matrix products, and kernels that wait for the GPU's memory.

        `traffic` is what a block's kernels move, relative to what was counted with 16-bit weights.
        """
        workload, again = self._workload, self._checkpointed
        computing = flops_per_token(workload) + again * forward_flops(workload)
        moved = self._traffic(traffic) + _adapter_traffic(workload) * self._model.num_layers
        products = computing / self._products * self._assignment.effects.compute
        products *= _PRODUCTS_OF_EXPERTS if self._model.num_experts > 1 else 1.0
        if self._model.vocab_size % _ALIGNED:
            products += (_UNALIGNED - 1) * self._head_flops / self._products
        products += self._slow_products() * (1 + again / 3)
        return products + moved / self._moves

    def of_tokens(self, per_token: float) -> float:
        """Seconds of all tokens of a micro-step."""
        return self._assignment.tokens * self._workload.usual_share * per_token

    def ramp(self, per_token: float) -> float:
        """Seconds of a micro-step that do not depend on its tokens, where computing takes `per_token` seconds a
        token."""
        of_kernels = _RAMP_TOKENS * self._machine.flops / 1e15 * per_token
        return of_kernels + self._dequantising() + self._short_chunks()

    def launch(self) -> float:
        """Seconds in which Python launches the kernels of forward and backward."""
        kernels = self._launches() + _LAUNCHED_AGAIN * self._checkpointed
        kernels *= 1 + _KERNELS_OF_AN_ADAPTER * len(self._workload.weights.adapted)
        kernels *= _LAUNCHES_OF_EXPERTS if self._model.num_experts > 1 else 1.0
        return self._machine.launch_seconds * self._model.num_layers * kernels

    def of_update(self) -> float:
        """Seconds of the matrix products in an optimizer's step, as Muon's, of all weights on one rank."""
        counted = self._workload.script.facts.counted if self._workload.script else None
        return counted.products * self._workload.weights.trained / self._products if counted else 0.0

    @property
    def chunks(self) -> int:
        """In how many chunks of tokens the head and the loss are computed; 0: all at once."""
        tokens = self._assignment.tokens
        return -(-tokens // chunk_rows(tokens, self._model)) if self._assignment.effects.chunked_loss else 0

    def _traffic(self, factor: float) -> float:
        """Bytes per token that element-wise kernels read and write. Forward is a third, which checkpointing repeats."""
        block, length = self._assignment.counted, self._workload.seq_len
        moved = block.moved + (block.moved_by_length + _MOVED_FOR_A_BIAS * block.biased_by_length) * length
        usual = _MOVED_BY_LOSS if has_wide_loss(self._workload) else _MOVED_BY_A_NARROW_LOSS
        of_loss = self._assignment.effects.moved_by_loss or usual
        of_blocks = factor * moved * self._model.num_layers * (1 + self._checkpointed / 3)
        return of_blocks + of_loss * self._model.vocab_size

    def _launches(self) -> float:
        """Host work of a block over that for a Llama block, without what experts add."""
        block = self._assignment.counted
        own = _LAUNCHES_FROM_PYTHON * block.from_python
        kernels = USUAL_KERNELS if self._model.num_experts > 1 and not own else block.kernels - block.from_python
        kernels += block.kernels_by_length * self._workload.seq_len
        return _LAUNCHES_BESIDE + _LAUNCHES_OF_A_KERNEL * kernels + own

    def _slow_products(self) -> float:
        """Seconds of a token by which a counted model's products take longer than in 16 bits and without masks."""
        block, length = usual_block(self._model), self._workload.seq_len
        in_32_bits = block.flops_32 + block.flops_32_by_length * length
        longer = in_32_bits * (1 / (self._machine.flops_32 * self._machine.achievable) - 1 / self._products)
        masked = (_WITH_A_MASK - 1) * attention_flops(block.masked, length)
        return self._model.num_layers * (longer + masked / self._products)

    def _short_chunks(self) -> float:
        """Seconds by which a chunked loss takes longer than its products, where a chunk is too short for them.

        Each chunk reads and writes the head's whole weight and its gradient, however few its tokens.
        """
        if not self.chunks:
            return 0.0
        workload, model = self._workload, self._model
        of_a_chunk = _OF_A_CHUNK if workload.weights.trains_head else _OF_A_CHUNK / 2
        moved = of_a_chunk * workload.width / 2 * model.vocab_size * model.hidden_size
        computing = self._assignment.tokens / self.chunks * self._head_flops / self._products
        return self.chunks * max(0.0, moved / self._moves - computing)

    @property
    def _head_flops(self) -> float:
        """Operations of the head's products, forward and backward, per token."""
        return (6.0 if self._workload.weights.trains_head else 4.0) * self._model.vocab_size * self._model.hidden_size

    def _dequantising(self) -> float:
        """Seconds of a micro-step to write quantised weights in 16 bits, once in each pass: with any micro-batch."""
        if self._workload.load_in is None:
            return 0.0
        moved = (BYTES_OF_A_WEIGHT[self._workload.load_in] + 2.0) * self._workload.weights.quantised
        return (2 + self._checkpointed) * moved / self._moves


def _adapter_traffic(workload: Workload) -> float:
    """Bytes per token that a block's adapters read and write besides their matrices' products.

    Derived from peft's passes, 2 bytes a value. Per output: B writes its own, which is scaled and added to the layer's
    (14 bytes); backward scales the gradient and reads it for B and for A's output (8). Per input: A reads it, also for
    its own gradient, and its share of the input's gradient is written and added (12); dropout reads and writes its own
    copy (10). Confirmed on one H200, where forward took 28 ms more than a plain one and 27 were derived.
    """
    lora = workload.lora
    if lora is None:
        return 0.0
    outputs = sum(matrix.outputs for matrix in workload.weights.adapted)
    inputs = sum(matrix.inputs for matrix in workload.weights.adapted)
    return workload.width / 2 * (22.0 * outputs + (22.0 if lora.dropout > 0 else 12.0) * inputs)
