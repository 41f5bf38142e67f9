"""What a block is predicted to keep for backward, counted without memory, is what autograd keeps on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import make_candidate
from helpers.saved_bytes import kept_by

from ladder.backends.registry import MAIN
from ladder.step.walk import kept
from ladder.trial.count import counted
from ladder.workload.counted import Counted
from ladder.workload.shapes import shape_from_config
from ladder.workload.workload import Task, Workload

_USUAL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 512}
_OLD = {"n_embd": 64, "n_head": 4, "n_positions": 512}
_NEVER_DROPPED = {"attention_probs_dropout_prob": 0.0}
"""On the CPU a mask of dropout takes two bytes, and on GPUs one."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("n_layer", {"hidden_size": 64, "n_head": 4}),
    "gemma3_text": ("num_hidden_layers", _USUAL | {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 64}),
    "gptj": ("n_layer", _OLD | {"rotary_dim": 8}),
    "megatron-bert": ("num_hidden_layers", _USUAL | _NEVER_DROPPED),
    "modernbert": ("num_hidden_layers", _USUAL | {"pad_token_id": 0, "local_attention": 64}),
    "mpt": ("n_layers", {"d_model": 64, "n_heads": 4, "max_seq_len": 512}),
    "olmoe": ("num_hidden_layers", _USUAL | {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("num_hidden_layers", _USUAL | {"num_key_value_heads": 4}),
    "phi": ("num_hidden_layers", _USUAL),
    "roformer": ("num_hidden_layers", _USUAL | _NEVER_DROPPED),
    "stablelm": ("num_hidden_layers", _USUAL | {"num_key_value_heads": 4}),
    "xglm": ("num_layers", {"d_model": 64, "attention_heads": 4, "ffn_dim": 128, "max_position_embeddings": 512}),
    "xlnet": ("n_layer", {"d_model": 64, "n_head": 4, "d_inner": 128, "dropout": 0.0}),
}
"""Families that write their attention out in Python, and others that formulas predicted wrong: the name of their number
of layers, and the rest of a tiny configuration."""
ENCODERS = ("megatron-bert", "modernbert", "roformer")
TOKENS = 256


def configuration(family: str, layers: int) -> dict[str, Any]:
    from transformers import AutoConfig

    name, sizes = FAMILIES[family]
    return AutoConfig.for_model(family, vocab_size=100, **sizes, **{name: layers}).to_dict()


def kept_by_forward(family: str, layers: int) -> int:
    """Bytes of all storages that autograd saves, but for parameters and buffers."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    from ladder.trial.model_class import model_config

    auto = AutoModelForMaskedLM if family in ENCODERS else AutoModelForCausalLM
    model = auto.from_config(model_config(configuration(family, layers))).to(torch.bfloat16)
    tokens = torch.randint(4, 100, (1, TOKENS))
    return kept_by(model, lambda: model(input_ids=tokens, labels=tokens).loss)


def predicted(family: str) -> float:
    """Bytes of one block."""

    def count(config: Any, task: Task | None, _: Any) -> Counted:
        reply = counted(dict(config), task)
        return Counted(tasks=tuple(reply["tasks"]), sizes=reply.get("sizes"))

    shape = shape_from_config(configuration(family, 2), name=family, source="file", count=count)
    task: Task = "masked-lm" if family in ENCODERS else "causal-lm"
    workload = Workload(model=shape, task=task, seq_len=TOKENS, global_batch_size=1)
    candidate = make_candidate("zero0", checkpointing=False, micro_batch=1)
    return kept(MAIN.assignment(workload, candidate, 1)) / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_keeps_for_backward_what_is_predicted(family: str) -> None:
    of_a_block = (kept_by_forward(family, 4) - kept_by_forward(family, 2)) / 2
    assert predicted(family) == pytest.approx(of_a_block, rel=0.12)
