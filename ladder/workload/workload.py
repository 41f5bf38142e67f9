"""What is trained: model shape, task, sequence length, dtype, optimizer, global batch. A tune never changes it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from ladder.optimizers.registry import OPTIMIZERS
from ladder.text import digest_of
from ladder.workload.lora import Lora
from ladder.workload.modules import Module, expanded
from ladder.workload.script import Script, keeps_its_optimizer
from ladder.workload.trained import LoadIn, Weights, weights_of

Task = Literal["causal-lm", "masked-lm", "seq2seq-lm"]
Dtype = Literal["bf16", "fp16", "fp32"]
OptimizerName = str
"""One of `optimizers.registry.OPTIMIZERS`."""
Source = Literal["bundled", "hub", "folder", "file"]
Computed = TypeVar("Computed")


def mixed_precision(dtype: str) -> str:
    """accelerate's word for a precision."""
    return "no" if dtype == "fp32" else dtype


@dataclass(frozen=True, kw_only=True)
class CountedBlock:
    """What a block of the model's own code does with weights of 16 bits, as the mean of all blocks.

    Bytes are those of a token in a further sequence of a micro-batch: what sequences share is not among them.
    """

    kept: float
    """Bytes that forward keeps for backward, but for those that grow with the sequence."""
    kept_by_length: float
    """Bytes more for each token of the sequence."""
    kept_for_weights: float
    """Bytes of these that only the gradients of the block's weights need."""
    moved: float
    """Bytes that kernels read and write whose time follows from them, forward and backward, but for those that grow
    with the sequence."""
    moved_by_length: float
    """Bytes more for each token of the sequence."""
    flops_32: float = 0.0
    """Operations of products in 32 bits, forward and backward, but for those that grow with the sequence."""
    flops_32_by_length: float = 0.0
    """Operations more for each token of the sequence."""
    masked: float = 0.0
    """Values of queries in attention with a mask."""
    biased_by_length: float = 0.0
    """Scores of attention with a bias that is trained, for each token of the sequence."""
    dropped_by_length: float = 0.0
    """Scores of attention some of which are dropped, for each token of the sequence."""
    kernels: float
    """Kernels, forward and backward, of any number of tokens; without those of attention."""
    kernels_by_length: float = 0.0
    """Kernels more for each token of the sequence, where layers have a state and Python goes from token to token."""
    from_python: float = 0.0
    """Kernels of these that Python starts one by one, as Triton's."""
    tensors: float
    """Parameter tensors."""
    kept_wide: float = 0.0
    """As `kept`, with weights of 32 bits under autocast."""
    kept_wide_by_length: float = 0.0
    kept_in_32_bits: float = 0.0
    """As `kept`, with weights of 32 bits and without autocast, where a state has these anyway; 0: twice as much."""
    kept_beside_packed: float = 0.0
    """As `kept_wide`, where all weights are frozen and bitsandbytes packs the linear layers."""
    kept_beside_packed_by_length: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a transformer, read from its config.json; counts are in elements, not bytes."""

    name: str
    """What the user asked for: a Hub id, a path, or the name of a bundled shape."""
    source: Source
    config: Mapping[str, Any]
    """The raw config.json, from which a rank builds the model with random weights."""
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    """Transformer blocks, encoder and decoder together."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None
    """The longest sequence that has positions in a table; None where they are computed."""
    made_for: int | None = None
    """The longest sequence that computed positions were made for; training goes past it."""
    num_parameters: int
    """All trainable parameters; a tied embedding counts once."""
    num_matmul_parameters: int
    """Parameters that every token is multiplied with: blocks and output head, without embedding tables and norms."""
    num_block_parameters: int
    """Parameters of one block; of the larger one if encoder and decoder blocks differ."""
    largest_parameter: int
    """Elements of the largest parameter tensor, which is the size of an NVMe buffer."""
    gated_mlp: bool
    is_encoder_decoder: bool
    tied: bool = False
    """The output head shares its weights with the embeddings, so its gradient is complete only after backward."""
    fails_with_fsdp2: bool = False
    """Of its weights, some belong to two of the parts into which accelerate divides a model for FSDP2."""
    note: str = ""
    """A sentence for the user about where the shape came from."""
    task: Task
    """Its usual task, or the one asked for."""
    section: str = ""
    """The key of `config` that holds the language model's sizes, such as text_config; "" if they are at the top."""
    checkpoints: bool = True
    """Its class can checkpoint activations."""
    num_experts: int = 1
    """Of a block; 1 without any."""
    experts_of_a_token: int = 1
    has_plain_attention: bool = False
    """Other functions can be put in the place of its attention, which has no window."""
    has_wide_loss: bool = True
    """The loss is computed in 32 bits."""
    rows: tuple[Mapping[str, Any], ...] = ()
    """Its modules, as `workload.modules.expanded` reads them."""
    block: CountedBlock | None = None
    """What a block does; None where its code cannot be run without values."""
    blocks_with: Mapping[str, CountedBlock] = field(default_factory=dict)
    """The same by the name of a technique whose kernels replace a block's: those that were asked and know the model."""

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """All modules that have parameters, from the input on."""
        return expanded(self.rows)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything about the training that the user fixes."""

    model: ModelShape
    task: Task
    seq_len: int
    """Tokens of one sequence."""
    global_batch_size: int
    """Sequences per optimizer step over all ranks; gradient accumulation is derived from it."""
    dtype: Dtype = "bf16"
    optimizer: OptimizerName = "adamw"
    gradient_clipping: float = 1.0
    """Maximum gradient norm; 0 switches clipping off."""
    lora: Lora | None = None
    """The adapters that are trained in place of the model's own weights."""
    load_in: LoadIn | None = None
    """How frozen linear layers are held if they are quantised."""
    prepare_kbit: bool = False
    """All other frozen weights are in fp32, as peft's prepare_model_for_kbit_training makes them."""
    freeze: tuple[str, ...] = ()
    """Names of modules whose weights are not trained."""
    script: Script | None = None
    """The user's own script, where that is what trains. `seq_len` is then its longest sequence."""

    @cached_property
    def weights(self) -> Weights:
        """The parameters: how many, which are trained, and their bytes."""
        return weights_of(self)

    @property
    def width(self) -> float:
        """Bytes of a value in the precision of the training."""
        return 4.0 if self.dtype == "fp32" else 2.0

    @cached_property
    def _known(self) -> dict[Hashable, Any]:
        return {}

    def remembered(self, key: Hashable, compute: Callable[[], Computed]) -> Computed:
        """What `compute` returns, which must depend on nothing but the workload and `key`; once for each key.

        A search asks for the same sums again and again, and a workload has no hash.
        """
        known = self._known
        try:
            found: Computed = known[key]
        except KeyError:
            found = known[key] = compute()
        return found

    def state_bytes(self, width: float = 4.0) -> float:
        """Bytes of the optimizer's states for each trained parameter, of which it has the weight in `width` bytes."""
        counted = self.script.facts.counted if self.script else None
        if counted is None:
            return OPTIMIZERS[self.optimizer].state_bytes(width)
        return counted.states if width == 4.0 else counted.states_of_16_bits

    @property
    def keeps_optimizer(self) -> bool:
        """Whether a Trainer makes an optimizer of its own, which no file of an answer may name."""
        return self.script is not None and keeps_its_optimizer(self.script.facts.kind, self.script.facts.optimizer)

    @property
    def optimizer_in_words(self) -> str:
        """As people call it: a script's own by its name."""
        return self.script.facts.optimizer if self.script and self.script.facts.optimizer else self.optimizer

    @property
    def sample_len(self) -> int:
        """Tokens of the longest sample, which may be of several sequences."""
        return self.seq_len * (self.script.facts.rows if self.script else 1)

    @property
    def usual_share(self) -> float:
        """Tokens of a usual sample over those of the longest."""
        return min(1.0, self.script.facts.mean_tokens / self.sample_len) if self.script else 1.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens of an optimizer step, as throughput counts them: without padding where a script has its own data."""
        return self.global_batch_size * (self.script.facts.mean_tokens if self.script else self.seq_len)

    @property
    def trains_16_bits(self) -> bool:
        """What trains has 16 bits, and a script's own training keeps no copy of it in fp32."""
        return self.script is not None and self.script.facts.trains_16_bits

    def completions(self, world_size: int) -> int | None:
        """What the script's trainer generates at once on all ranks; None for a training that generates nothing."""
        return self.script.facts.completions(self.global_batch_size, world_size) if self.script else None

    def fingerprint(self) -> str:
        """Twelve hex digits that change whenever anything about the training changes."""
        facts: list[Any] = [
            self.model.config,
            self.task,
            self.seq_len,
            self.global_batch_size,
            self.dtype,
            self.optimizer,
            self.gradient_clipping,
        ]
        if self.lora or self.load_in or self.freeze:
            facts.append([asdict(self.lora) if self.lora else None, self.load_in, list(self.freeze)])
        facts += ["prepare_kbit"] if self.prepare_kbit else []
        facts += [self.script.identity] if self.script else []
        return digest_of(facts, 12)
