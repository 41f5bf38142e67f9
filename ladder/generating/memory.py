"""What a way takes of memory: weights, the keys and values of all tokens, a prompt's activations, what is gathered."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ladder.generating.ways import Generation, Way
from ladder.units import GIB, format_bytes, gib
from ladder.workload.workload import ModelShape

_OUTSIDE_ALONE, _OUTSIDE_OF_SEVERAL = 1.4 * GIB, 1.8 * GIB
"""Bytes outside PyTorch on a GPU, of one rank and where there are several. Measured for trainings (`search.memory`)."""
_PACKED = {"8bit": 1.0, "4bit": 0.516}
"""Bytes of a weight. Derived: 64 weights of 4 bits share a scale of 8 bits, and 256 scales one of 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the GPU that holds most, and on the host for all ranks together."""

    weights: int
    gathered: int
    """Stage 3: of whole layers, while they compute."""
    cache: int
    """Keys and values of all tokens."""
    prompt: int
    """What the prompt's pass holds at once, and logits."""
    outside: int
    """Outside PyTorch: CUDA, NCCL, libraries."""
    host: int = 0

    @property
    def device(self) -> int:
        return self.weights + self.gathered + self.cache + self.prompt + self.outside

    def plain(self) -> dict[str, Any]:
        """As values for JSON, in GiB."""
        return {f"{part}_gib": gib(size) for part, size in (*asdict(self).items(), ("device", self.device))}


def predicted(way: Way, problem: Generation, batch: int) -> Memory:
    """Of `way` with `batch` prompts at once."""
    model, width = problem.model, problem.workload.width
    devices = way.devices(problem.world_size)
    shared = devices if way.spread != "whole" else 1
    rows = way.prompts_of_a_rank(batch, problem.world_size)
    weights = _weights(way, model, width)
    offloads = way.tier > 1
    gathered = 0.0
    if way.rung is not None:  # a layer computes while the next one is fetched
        gathered = width * max(2 * model.num_block_parameters, model.largest_parameter)
    cache = width * rows * cached_values(model, problem.prompt_len, problem.new_tokens)
    outside = 0.0
    if problem.device == "cuda":
        outside = _OUTSIDE_OF_SEVERAL if way.processes(problem.world_size) > 1 else _OUTSIDE_ALONE
    return Memory(
        weights=0 if offloads else int(weights / shared),
        gathered=int(min(gathered, weights)),
        cache=int(cache / shared if way.spread in ("layers", "tensors") else cache),
        prompt=int(rows * (_of_a_prompt(model, problem.prompt_len, width) + _of_logits(model, width))),
        outside=int(outside),
        host=int(weights) if way.rung is not None and way.rung.offload_param == "cpu" else 0,
    )


def _weights(way: Way, model: ModelShape, width: float) -> float:
    if way.load_in is None:
        return width * model.num_parameters
    # The output head stays as it is, and so do embeddings and norms.
    packed = model.num_matmul_parameters - model.vocab_size * model.hidden_size
    return _PACKED[way.load_in] * packed + width * (model.num_parameters - packed)


def cached_values(model: ModelShape, prompt_len: int, new_tokens: int) -> int:
    """Values of all layers' keys and values for one prompt with its new tokens.

    A decoder with an encoder has keys of the prompt beside those of its own tokens. Layers with a window keep that.
    """
    text = model.config.get(model.section, model.config) if model.section else model.config
    tokens, layers = prompt_len + new_tokens, model.num_layers
    per_token = 2 * model.num_kv_heads * model.head_dim
    if text.get("kv_lora_rank"):  # keys and values are cached as they are used: of every head, each of its own size
        key = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
        per_token = model.num_heads * (key + text["v_head_dim"])
    if model.is_encoder_decoder:
        layers //= 2
    window, kinds = int(text.get("sliding_window") or tokens), text.get("layer_types") or ()
    narrow = sum(kind == "sliding_attention" for kind in kinds)
    return int(per_token * (min(tokens, window) * narrow + tokens * (layers - narrow)))


def _of_a_prompt(model: ModelShape, prompt_len: int, width: float) -> float:
    """Bytes of one prompt in a layer's pass, which keeps nothing for backward. Derived from the layer's operations."""
    hidden, heads = model.hidden_size, model.num_heads * model.head_dim
    keys = 2 * model.num_kv_heads * model.head_dim
    attention = 2 * (heads + keys) + heads  # as made, as rotated, and what comes out
    net = (3 if model.gated_mlp else 2) * model.intermediate_size
    if model.num_experts > 1:
        net = model.experts_of_a_token * (net + hidden)
    return width * prompt_len * (2 * hidden + max(attention, net))


def _of_logits(model: ModelShape, width: float) -> float:
    """Of the last token alone, as `generate` asks for: in the model's precision and in 32 bits, before and after it has
    forbidden what ends the text."""
    return model.vocab_size * (width + 8)


def too_much(way: Way, problem: Generation) -> str:
    """Why `way` cannot fit, whatever else: its weights alone are more than there is. Empty if they are not."""
    found = predicted(way, problem, 1)
    for held, limit, place in (
        (found.weights, problem.memory_limit, "a device"),
        (found.host, problem.host_memory, "the host"),
    ):
        if held > limit:
            return f"its weights alone are {format_bytes(held)}, and {place} has {format_bytes(limit)}"
    return ""
