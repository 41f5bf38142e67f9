"""A rank's models after another one in the same process that had Liger's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.integrations import liger
from transformers.models.llama import modeling_llama

from ladder.trial.techniques.liger import TECHNIQUE


class Norm(modeling_llama.LlamaRMSNorm):  # type: ignore[misc]  # transformers has no types
    pass


def as_liger_does(model: PreTrainedModel, config: Any) -> None:
    changes = ((modeling_llama, "LlamaRMSNorm", Norm), (modeling_llama.LlamaMLP, "has_kernels", True))
    for place, name, value in (*changes, (model, "forward", model.forward)):
        setattr(place, name, value)


def test_a_model_is_built_as_in_a_new_process_after_one_with_liger_s_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> LlamaForCausalLM:
        TECHNIQUE.before_model()
        with torch.device("meta"):
            return LlamaForCausalLM(
                LlamaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=8, num_attention_heads=1)
            )

    monkeypatch.setattr(liger, "apply_liger_kernel", as_liger_does)
    first = build()
    TECHNIQUE.change_model(first)
    assert modeling_llama.LlamaRMSNorm is Norm
    second = build()
    assert type(second.model.norm) is type(first.model.norm) is not Norm
    assert not hasattr(modeling_llama.LlamaMLP, "has_kernels")
