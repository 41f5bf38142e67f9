"""What transformers' own modules save for backward, counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

from ladder.launch.counting import counting
from ladder.workload.lora import Lora
from ladder.workload.shapes import shape_from_config
from ladder.workload.workload import ModelShape

SEQ_LEN = 256
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128}
LLAMA_LIKE = SMALL | {"intermediate_size": 1024, "num_key_value_heads": 4, "head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"intermediate_size": 1024},
    "qwen3": LLAMA_LIKE,
    "qwen3, wide heads": {key: value for key, value in LLAMA_LIKE.items() if key != "head_dim"},
    "opt": SMALL | {"ffn_dim": 1024, "word_embed_proj_dim": 256, "max_position_embeddings": 256},
    "gpt2": {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 128, "activation_function": "gelu_new"},
    "gpt_neox": SMALL | {"intermediate_size": 1024},
    "gemma": LLAMA_LIKE,
    "mixtral": LLAMA_LIKE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": LLAMA_LIKE | {"moe_intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 4},
}


def kept_by(model: torch.nn.Module, forward: Callable[[], torch.Tensor], *, autocast: bool = False) -> int:
    """Bytes of all storages that autograd saves in a forward pass, but for parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # which holds on to it, so that no address comes twice
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), hooks:
        assert forward().isfinite().all()
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in own)


def saved_bytes(shape: ModelShape, lora: Lora | None = None, tokens: int = SEQ_LEN, *, autocast: bool = False) -> int:
    """Of the tensors that a forward pass in training saves, whatever shares memory counted once, less the weights.

    With `autocast`, what is trained is in fp32, as with DDP.
    """
    fields = {key: value for key, value in shape.config.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(shape.model_type, **fields)
    for name in ("dropout", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    config.use_cache = False
    of_weights = torch.float32 if autocast and lora is None else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=of_weights)
    if lora is not None:
        model = get_peft_model(model, LoraConfig(**lora.for_peft()))  # which makes adapters of 16-bit weights fp32
        model = model if autocast else model.to(torch.bfloat16)  # as DeepSpeed's engine does
    model.train()
    sequence = torch.randint(4, shape.vocab_size, (1, tokens))
    return kept_by(model, lambda: model(input_ids=sequence, labels=sequence).loss, autocast=autocast)


def block_of(
    family: str, lora: Lora | None = None, tokens: int = SEQ_LEN, *, autocast: bool = False
) -> tuple[ModelShape, float]:
    """The shape of `family`, and the bytes that one of its blocks saves, with adapters beside frozen weights or not."""
    config = {"model_type": family.split(",")[0], **FAMILIES[family]}
    shape = shape_from_config(config, name=family, source="file", count=counting())
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    fewer = shape_from_config({**config, layers: 2}, name=family, source="file", count=counting())
    more, less = (saved_bytes(each, lora, tokens, autocast=autocast) for each in (shape, fewer))
    return shape, (more - less) / 2
