"""Shapes written by hand, and the measurements that the models of memory and speed are held against."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.backends.deepspeed.rungs import RUNGS
from ladder.candidates import Candidate, Engine, Knob
from ladder.workload.shapes import shape_from_config
from ladder.workload.workload import Workload

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
SMALL_OPT = {key: value for key, value in SMALL.items() if key != "intermediate_size"} | {
    "model_type": "opt",
    "ffn_dim": 96,
}
SMALL_T5 = {
    "d_model": 64,
    "d_kv": 8,
    "d_ff": 96,
    "num_layers": 3,
    "num_decoder_layers": 4,
    "num_heads": 6,
    "vocab_size": 99,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama with biases": SMALL | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "llama tied": SMALL | {"tie_word_embeddings": True},
    "qwen2 without key-value heads": SMALL | {"model_type": "qwen2", "num_key_value_heads": None},
    "qwen3 with its default head size": SMALL | {"model_type": "qwen3", "num_key_value_heads": 2},
    "qwen3 with biases": SMALL
    | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True},
    "gemma": SMALL | {"model_type": "gemma", "num_key_value_heads": 1},
    "mistral with wide heads": SMALL | {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 32},
    "opt with narrow embeddings": SMALL_OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "opt without biases": SMALL_OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False},
    "bert": SMALL | {"model_type": "bert"},
    "bert untied": SMALL | {"model_type": "bert", "tie_word_embeddings": False},
    "roberta untied": SMALL | {"model_type": "roberta", "tie_word_embeddings": False},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 100},
    "gpt_neox": SMALL | {"model_type": "gpt_neox"},
    "t5 with narrow attention": SMALL_T5 | {"model_type": "t5"},
    "t5 gated": SMALL_T5 | {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": SMALL_T5 | {"model_type": "mt5"},
}

MEASURED = Path(__file__).parents[1] / "data" / "measured-4xh200-llama2-7b.json"

# The knobs of those runs were not recorded: DeepSpeed's defaults, as far as the peaks agree with them. A sub-group of
# 1e9 would have made the optimizer step of the full-depth stage 3 the peak, so it must have been smaller.
BELOW_STAGE_3: tuple[Knob, ...] = (("overlap_comm", False), ("reduce_bucket_size", 500_000_000))
STAGE_3: tuple[Knob, ...] = (
    ("reduce_bucket_size", 500_000_000),
    ("stage3_prefetch_bucket_size", 50_000_000),
    ("sub_group_size", 500_000_000),
)
# DeepSpeed's default, which the rung with parameters on NVMe had then, and has no more (as in benchmarks/physics.py).
REUSE: tuple[Knob, ...] = (("stage3_max_reuse_distance", 1_000_000_000),)


@dataclass(frozen=True)
class Point:
    """One measured point; times and bytes are None where it ran out of memory."""

    workload: Workload
    candidate: Candidate
    accumulate_seconds: float | None
    boundary_seconds: float | None
    allocated_gib: float | None
    reserved_gib: float | None
    host_gib: float | None

    @property
    def num_layers(self) -> int:
        return self.workload.model.num_layers

    @property
    def rung(self) -> str:
        return self.candidate.engine.rung.name


def llama_like(
    num_layers: int = 32,
    *,
    hidden: int = 4096,
    intermediate: int = 11008,
    heads: int = 32,
    kv_heads: int | None = None,
    vocab: int = 32000,
    seq_len: int = 2048,
    **changes: object,
) -> Workload:
    """A workload on a Llama shape with an untied output head; `changes` are of the workload's own fields."""
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
    }
    model = shape_from_config(config, name="llama-like", source="file")
    settings = {"task": "causal-lm", "seq_len": seq_len, "global_batch_size": 64} | changes
    return Workload(model=model, **settings)  # type: ignore[arg-type]


def measured() -> Iterator[Point]:
    for row in json.loads(MEASURED.read_text())["points"]:
        layers, stage, optimizer, param, checkpointing, micro_batch, *measured = row
        rung = next(r for r in RUNGS if (r.stage, r.offload_optimizer, r.offload_param) == (stage, optimizer, param))
        then = tuple(sorted(STAGE_3 + REUSE)) if rung.offload_param == "nvme" else STAGE_3
        engine = Engine(rung, then if stage == 3 else BELOW_STAGE_3)
        yield Point(llama_like(layers), Candidate(engine, checkpointing, micro_batch, 2), *measured)
