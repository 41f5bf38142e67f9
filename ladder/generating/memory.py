"""What a way takes of memory: weights, keys and values of all tokens, a prompt's activations, what is gathered."""

from __future__ import annotations

from typing import NamedTuple

from ladder.generating.ways import Generation, Way
from ladder.units import GIB, format_bytes
from ladder.workload.workload import ModelShape

_OUTSIDE_ALONE, _OUTSIDE_OF_SEVERAL = 1.4 * GIB, 1.8 * GIB
"""Bytes outside PyTorch on a GPU, of one rank and where there are several. Measured for trainings (`search.memory`)."""
_PACKED = {"8bit": 1.0, "4bit": 0.516}
"""Bytes of a weight. Derived: 64 weights of 4 bits share a scale of 8 bits, and 256 scales one of 32 bits."""


class Memory(NamedTuple):
    """Bytes on the GPU that holds most; on the host, of all ranks together."""

    weights: int
    gathered: int
    """Stage 3: of whole layers, while they compute."""
    cache: int
    """Keys and values of all tokens."""
    prompt: int
    """What the prompt's pass holds at once, and logits."""
    outside: int
    """Outside PyTorch: CUDA, NCCL, libraries."""
    host: int

    @property
    def device(self) -> int:
        return sum(self) - self.host


def predicted(way: Way, problem: Generation, batch: int) -> Memory:
    """Of `way` with `batch` prompts at once."""
    model, width, ranks = problem.workload.model, problem.workload.width, problem.machine.world_size
    shared = ranks if way.spread != "whole" else 1
    rows = -(-batch // ranks) if way.own_prompts else batch
    weights = width * model.num_parameters
    if way.load_in is not None:  # but for the output head, embeddings and norms
        packed = model.num_matmul_parameters - model.vocab_size * model.hidden_size
        weights += (_PACKED[way.load_in] - width) * packed
    # A layer computes while the next one is fetched.
    gathered = width * max(2 * model.num_block_parameters, model.largest_parameter) if way.rung is not None else 0.0
    cache = width * rows * cached_values(model, problem.prompt_len, problem.new_tokens)
    outside = _OUTSIDE_OF_SEVERAL if way.processes(ranks) > 1 else _OUTSIDE_ALONE
    # Of the last token alone: in the model's precision, and in 32 bits before and after what ends a text is forbidden.
    logits = rows * model.vocab_size * (width + 8)
    return Memory(
        weights=0 if way.tier > 1 else int(weights / shared),
        gathered=int(min(gathered, weights)),
        cache=int(cache / shared if way.spread in ("layers", "tensors") else cache),
        prompt=int(rows * width * problem.prompt_len * _values_of_a_token(model) + logits),
        outside=int(outside) if problem.machine.device == "cuda" else 0,
        host=int(weights) if way.rung is not None and way.rung.offload_param == "cpu" else 0,
    )


def cached_values(model: ModelShape, prompt_len: int, new_tokens: int) -> int:
    """Values of all layers' keys and values for one prompt with its new tokens.

    A decoder with an encoder has keys of the prompt beside those of its own tokens. Layers with a window keep that.
    """
    text = model.config[model.section] if model.section else model.config
    tokens = prompt_len + new_tokens
    layers = model.num_layers // 2 if model.is_encoder_decoder else model.num_layers
    of_a_token = 2 * model.num_kv_heads * model.head_dim
    if text.get("kv_lora_rank"):  # cached as they are used: of every head, keys and values each of their own size
        of_a_token = model.num_heads * sum(text[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
    window = min(tokens, int(text.get("sliding_window") or tokens))
    narrow = sum(kind == "sliding_attention" for kind in text.get("layer_types") or ())
    return int(of_a_token * (window * narrow + tokens * (layers - narrow)))


def _values_of_a_token(model: ModelShape) -> int:
    """Of a prompt, in a layer's pass that keeps nothing for backward. Derived from the layer's operations."""
    heads, keys = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    attention = 2 * (heads + keys) + heads  # as made, as rotated, and what comes out
    net = (3 if model.gated_mlp else 2) * model.intermediate_size
    if model.num_experts > 1:
        net = model.experts_of_a_token * (net + model.hidden_size)
    return 2 * model.hidden_size + max(attention, net)


def too_much(way: Way, problem: Generation) -> str:
    """Why `way` cannot fit, whatever else: its weights alone are more than there is. Empty if they are not."""
    found, machine = predicted(way, problem, 1), problem.machine
    on_host = found.host > machine.host_memory
    held, limit = (found.host, machine.host_memory) if on_host else (found.weights, machine.memory_limit)
    where = "the host" if on_host else "a device"
    return f"its weights alone are {format_bytes(held)}, and {where} has {format_bytes(limit)}" if held > limit else ""
