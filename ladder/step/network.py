"""A model as a list of operations: their order from transformers' sources, and their sums as its blocks were counted.

Memory is computed by walking through the list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ladder.candidates import Effects
from ladder.step.autocast import Autocast
from ladder.step.counted import (
    SCORES_AT_ONCE,
    Device,
    kept_under_autocast,
    scores_in_32_bits,
    usual_block,
)
from ladder.step.operation import Block, Operation
from ladder.step.partly_trained import PartlyTrained, scaled_to
from ladder.workload.modules import Module
from ladder.workload.workload import CountedBlock, ModelShape, Workload

_SAVED_BY_ACTIVATION = {"relu": 0, "gelu_new": 8}
"""Bytes per value besides the output (derived from transformers): ReLU saves only its output; `gelu_new`, which is
Python code, saves its input, half of it, the tangent and one more sum. Others save their input."""


_OF_EXCHANGES = 4.0
"""Bytes for each value of the queries that exchanges of heads leave until a block's backward is over: 2 are the output
of attention in its other layout. Measured: 2 to 6 with Llama-3.2-1B on two H200 (benchmarks/results/2xh200-more-rungs).
"""


@dataclass(frozen=True)
class Network:
    """The operations of a workload's model, with the effects of an engine's techniques."""

    workload: Workload
    effects: Effects
    counted: CountedBlock
    """What a block does with the engine's kernels, in the precision of the training."""
    autocasts: bool = False
    """Trained weights are fp32, under autocast."""
    device: Device = "cuda"

    @property
    def model(self) -> ModelShape:
        return self.workload.model

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All transformer blocks, from the input on."""
        plain = (Block(self.block),) * self.model.num_layers
        blocks = plain if self._parts is None else self._parts.blocks(self.block, self.counted)
        if self._autocast is None:
            return blocks
        changed = self._autocast.blocks(blocks)
        wanted = kept_under_autocast(self.workload, self.counted)
        if not wanted:
            return changed
        # One that trains everything was counted, or one that trains adapters alone.
        like = changed[-1:] if self.workload.prepare_kbit else self._autocast.blocks([Block(self.block)])
        scaled = {
            block: replace(block, operations=scaled_to(wanted, block.operations, like[0].operations))
            for block in set(changed)
        }
        return tuple(scaled[block] for block in changed)

    @cached_property
    def _autocast(self) -> Autocast | None:
        return Autocast(self.workload, self.effects) if self.autocasts else None

    @cached_property
    def _parts(self) -> PartlyTrained | None:
        is_whole = self.workload.lora is None and not self.workload.freeze
        return None if is_whole else PartlyTrained(self.workload)

    @cached_property
    def block(self) -> tuple[Operation, ...]:
        """The operations of one transformer block with all its weights trained, in the order of the forward pass."""
        operations = [*self._attention("attention")]
        if self.model.is_encoder_decoder:
            # Only decoder blocks, half of all, have cross-attention; every block is modelled as the mean of both kinds.
            operations += self._attention("cross", share=0.5)
        if self.model.gated_mlp:
            operations += self._net_of_experts() if self.model.num_experts > 1 else self._gated_net()
        else:
            operations += self._plain_net()
        missing = self._block_elements - sum(operation.elements for operation in operations)
        biases = Operation(name="biases", others=max(0, missing), tensors=self._num_biases)
        return self._as_counted([*operations, biases])

    def _as_counted(self, operations: list[Operation]) -> tuple[Operation, ...]:
        """`operations` that together save what was counted; their gradients have the width of the training."""
        counted, length = self.counted, self.workload.seq_len
        for_weights = sum(each.for_weight for each in operations)
        others = sum(each.saves for each in operations) - for_weights
        of_weights = counted.kept_for_weights / for_weights if for_weights else 0.0
        kept = counted.kept + counted.kept_by_length * length - of_weights * for_weights
        of_others, wider = max(0.0, kept) / others, self.workload.width / 2
        scores = scores_in_32_bits(self.model, usual_block(self.model), self.device) if wider > 1 else 0.0
        own = self._block_elements / max(self._block_elements, sum(each.elements for each in operations))
        share, scaled = own * self._share, []
        for each in operations:
            again = each.for_weight * of_weights
            more = SCORES_AT_ONCE * scores * length if each.name == "scores" else 0.0
            wide = replace(
                each,
                saves=(each.saves - each.for_weight) * of_others + again,
                for_weight=again,
                makes=each.makes * wider,
                ends=each.ends * wider,
                scratch=each.scratch * wider + more,
                share=share,
            )
            scaled.append(self._exchanged(wide) if each.name == "scores" else wide)
        return tuple(scaled)

    def _exchanged(self, scores: Operation) -> Operation:
        """With sequence parallelism, heads are exchanged for tokens: what was exchanged is kept in both layouts, and
        each exchange makes copies on both sides.
        """
        if not self.effects.shares_sequence:
            return scores
        q = self.model.num_heads * self.model.head_dim
        return replace(
            scores,
            saves=scores.saves + _OF_EXCHANGES * q,
            scratch=scores.scratch + 4.0 * q,
        )

    @cached_property
    def _share(self) -> float:
        """Of all elements those that a script trains, wherever they are."""
        weights = self.workload.weights
        is_named = self.workload.lora is not None or bool(self.workload.freeze)
        return 1.0 if is_named else weights.trained / max(1, weights.total - weights.still)

    @cached_property
    def table(self) -> int:
        """Elements of the embeddings and other lookup tables."""
        outside = self.model.num_parameters - self.model.num_layers * sum(each.elements for each in self.block)
        return max(1, outside - (0 if self.model.tied else self.head) - self.model.hidden_size)

    @property
    def head(self) -> int:
        return self.model.vocab_size * self.model.hidden_size

    @property
    def trained_table(self) -> int:
        """Elements of `table` that have a gradient."""
        return round(self._share * self.table) if self._parts is None else max(0, self._parts.trained_of(self.table))

    @property
    def trained_head(self) -> int:
        """Elements of the head's gradient; 0 if it has none."""
        return round(self._share * self.head) if self.workload.weights.trains_head else 0

    @cached_property
    def last_norm(self) -> Operation:
        """The norm before the head."""
        norm, wider = self._norm("norm", self.model.hidden_size), self.workload.width / 2
        if wider > 1:
            norm = replace(norm, saves=norm.saves * wider, for_weight=norm.for_weight * wider, scratch=norm.scratch)
        norm = norm if self._parts is None else self._parts.last_norm(norm)
        return norm if self._autocast is None else self._autocast.operation(norm)

    @property
    def largest_gradient(self) -> int:
        """Elements of the largest gradient."""
        outside = max(self.trained_table, self.trained_head)
        return outside or max(sum(each.gradients) for block in self.blocks for each in block.operations)

    @property
    def num_tensors(self) -> int:
        """Tensors that are trained."""
        outside = (2 if self.model.tied else 3) if self._parts is None else self._parts.num_outside
        return sum(block.num_trained for block in self.blocks) + outside

    @property
    def _block_elements(self) -> int:
        outside = self.head * (1 if self.model.tied else 2)
        mean = (self.model.num_parameters - outside) // self.model.num_layers
        return min(self.model.num_block_parameters, mean)

    @property
    def _num_biases(self) -> int:
        if not self.model.gated_mlp and not self.model.is_encoder_decoder:
            return 6
        return sum(each.elements > each.size > 0 for each in self._first_block)

    @cached_property
    def _first_block(self) -> list[Module]:
        return [each for each in self.model.modules if each.layer == 0]

    def _norm(self, name: str, width: int) -> Operation:
        """RMSNorm is Python code that saves its fp32 input and a 16-bit value; LayerNorm, a kernel, only its input."""
        is_python = self.model.gated_mlp or self.model.is_encoder_decoder
        if is_python:
            kept = self.effects.norm_keeps
            saves, scratch = 6.0 * kept, 12.0 * kept
            for_weight = max(0.0, saves - 4.0)  # the scale is multiplied with the 16-bit value; a kernel recomputes it
        else:
            saves, scratch, for_weight = 2.0, 2.0, 0.0
        return Operation(
            name=name,
            others=width * (1 if self.model.gated_mlp else 2),
            tensors=1 if self.model.gated_mlp else 2,
            saves=saves * width,
            saves_input=not is_python or self.effects.norm_keeps < 1.0,
            for_weight=for_weight * width,
            makes=2.0 * width,
            ends=4.0 * width,
            scratch=scratch * width,
        )

    def _product(
        self, name: str, inputs: int, outputs: int, *, reads: str, saves: float, ends: float, for_weight: float = 0.0
    ) -> Operation:
        """A linear layer; `saves` its input if no other operation does."""
        return Operation(
            name=name,
            weight=(inputs, outputs),
            tensors=1,
            reads=reads,
            saves=saves,
            for_weight=for_weight,
            makes=2.0 * inputs,
            ends=ends,
        )

    def _attention(self, name: str, share: float = 1.0) -> list[Operation]:
        """Norm, queries, keys, values, attention and its output; `share` is the fraction of blocks that have it."""
        model, h = self.model, int(self.model.hidden_size * share)
        q, k = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        small: list[Operation] = []
        if sum(each.kind == "other" and each.elements == model.head_dim for each in self._first_block) == 2:
            # These are not on the residual stream, so the gradient that they create replaces the one that they free.
            both = (self._norm("queries' norm", q), self._norm("keys' norm", k))
            small = [replace(each, others=model.head_dim, ends=each.makes) for each in both]
        return [
            self._norm(f"{name} norm", h),
            self._product("queries", h, q, reads="a", saves=2.0 * h, ends=2.0 * q, for_weight=2.0 * h),
            self._product("keys", h, k, reads="a", saves=0.0, ends=2.0 * (k + h)),
            self._product("values", h, k, reads="a", saves=0.0, ends=2.0 * (k + h)),
            *small,
            self._scores(q, k, share),
            self._product("output", q, h, reads="q", saves=self._dropout * h, ends=0.0),
        ]

    def _scores(self, q: int, k: int, share: float) -> Operation:
        """SDPA, which saves queries, keys, values, output, and one fp32 number per head.

        Its backward sums the gradient of queries in fp32.
        """
        length, heads = self.workload.seq_len, self.model.num_heads
        saves, scratch = 4.0 * q + 4.0 * k + 4.0 * heads, 4.0 * q
        if self.model.is_encoder_decoder:
            # T5 adds a bias to the scores in Python: their softmax in fp32 and in 16 bits, and a mask of dropout.
            saves += 7.0 * heads * length
        return Operation(
            name="scores",
            saves=saves * share,
            makes=(2.0 * q + 4.0 * k) * share,
            ends=2.0 * q * share,
            scratch=scratch * share,
        )

    def _gated_net(self) -> list[Operation]:
        h, f = self.model.hidden_size, self.model.intermediate_size
        return [
            self._norm("net norm", h),
            self._product("gate", h, f, reads="n", saves=2.0 * h, ends=2.0 * (f + h), for_weight=2.0 * h),
            self._activation(f),
            self._product("up", h, f, reads="n", saves=0.0, ends=2.0 * f),
            self._gating(f),
            self._product("down", f, h, reads="f", saves=2.0 * f, ends=0.0, for_weight=2.0 * f),
        ]

    def _net_of_experts(self) -> list[Operation]:
        """Each token is copied for the experts that it meets, sorted by expert; what they make is weighted and summed.

        The copies are read by one grouped product.
        """
        model, each = self.model, self.model.experts_of_a_token
        h, copies, f = model.hidden_size, each * model.hidden_size, each * model.intermediate_size
        return [
            self._norm("net norm", h),
            self._product("router", h, model.num_experts, reads="n", saves=2.0 * h, ends=0.0, for_weight=2.0 * h),
            Operation(
                name="sending",
                saves=24.0 * each,
                makes=2.0 * h,
                ends=2.0 * (copies + h),
            ),
            self._product(
                "gate and up", h, 2 * f, reads="n", saves=2.0 * copies, ends=2.0 * f, for_weight=2.0 * copies
            ),
            self._activation(f),
            self._gating(f),
            self._product("down", f, h, reads="f", saves=2.0 * f, ends=0.0, for_weight=2.0 * f),
            Operation(
                name="summing",
                saves=2.0 * copies + 16.0 * each,
                makes=4.0 * copies,
                ends=2.0 * copies,
            ),
        ]

    def _activation(self, f: int) -> Operation:
        """Of a gate."""
        keeps = self.effects.keeps_gate
        ends = 2.0 * f if keeps else 0.0
        return Operation(name="activation", saves=2.0 * f, makes=2.0 * f, ends=ends, in_place=not keeps)

    def _gating(self, f: int) -> Operation:
        """The product of the activated gate with the other half."""
        keeps = self.effects.keeps_gate
        kept = (4.0 if keeps else 2.0) * f
        return Operation(name="gating", saves=kept, makes=kept, ends=2.0 * f, in_place=not keeps)

    def _plain_net(self) -> list[Operation]:
        h, f = self.model.hidden_size, self.model.intermediate_size * self.model.experts_of_a_token
        usual = "relu" if any(each.is_kept and each.reads == "f" for each in self._first_block) else None
        activation = self.model.config.get("activation_function", self.model.config.get("hidden_act", usual))
        saves = _SAVED_BY_ACTIVATION.get(str(activation), 2)
        return [
            self._norm("net norm", h),
            self._product("widen", h, f, reads="n", saves=2.0 * h, ends=2.0 * f, for_weight=2.0 * h),
            Operation(
                name="activation",
                saves=float(saves * f),
                makes=2.0 * f,
                ends=2.0 * f,
            ),
            self._product(
                "narrow",
                f,
                h,
                reads="f",
                saves=(2.0 * f) + self._dropout * h,
                ends=0.0,
                for_weight=2.0 * f if saves else 0.0,  # ReLU needs its own output, which is this input
            ),
        ]

    @property
    def _dropout(self) -> float:
        """Bytes of dropout's mask per output value of attention or MLP."""
        rate = self.model.config.get("dropout", self.model.config.get("resid_pdrop", 0.1))
        return 0.0 if self.model.gated_mlp or not rate else 1.0
