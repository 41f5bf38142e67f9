"""Tiny configurations of families that ladder itself does not know: transformers counts them."""

from __future__ import annotations

from typing import Any

_DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {
    "embedding_size": 32,
    **{key: _DECODER[key] for key in list(_DECODER)[:4]},
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "albert": {"model_type": "albert", **_ENCODER},
    "electra": {"model_type": "electra", "architectures": ["ElectraForPreTraining"], **_ENCODER},
    "jamba": {
        "model_type": "jamba",
        **_DECODER,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **_DECODER, "head_dim": 16, "sliding_window": 16},
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
        "mm_tokens_per_image": 4,
        "image_token_index": 990,
    },
    "llava": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **_DECODER},
        "vision_config": {"model_type": "clip_vision_model", **_TOWER},
        "image_token_index": 990,
    },
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "text_config": {
            "model_type": "qwen2_vl_text",
            **_DECODER,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        },
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "patch_size": 14,
        },
        "image_token_id": 990,
        "video_token_id": 991,
        "vision_start_token_id": 992,
        "vision_end_token_id": 993,
    },
    "distilbert": {
        "model_type": "distilbert",
        "dim": 64,
        "hidden_dim": 96,
        "n_layers": 4,
        "n_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
    },
    "mamba": {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 4, "state_size": 8, "vocab_size": 1000},
    "mamba2": {
        "model_type": "mamba2",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "state_size": 8,
        "vocab_size": 1000,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    },
    "xlm-roberta": {"model_type": "xlm-roberta", **_DECODER},
    "bart": {
        "model_type": "bart",
        "d_model": 64,
        "encoder_layers": 4,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
    },
}

COUNTED = (
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_positions",
    "num_parameters",
    "num_matmul_parameters",
    "num_block_parameters",
    "largest_parameter",
    "gated_mlp",
    "is_encoder_decoder",
    "fails_with_fsdp2",
)
"""What counting finds of a model, besides its layers."""
