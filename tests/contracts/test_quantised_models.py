"""Models whose layers bitsandbytes holds in fewer bits, as a rank builds them."""

from __future__ import annotations

import gc
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TINY, TINY_CONFIG, make_candidate, tiny_trial
from torch._subclasses import FakeTensor

from ladder.backends.activations import activations_of
from ladder.events.as_json import from_plain
from ladder.events.step_policy import CandidateSpec
from ladder.trial.model import build_model, set_checkpointing
from ladder.trial.model_class import auto_class, model_config
from ladder.trial.quantised import quantised_model
from ladder.workload.config_guard import _UNPACKED_BY
from ladder.workload.lora import Lora
from ladder.workload.trained import LoadIn
from ladder.workload.workload import Workload

TOKENS = 256


def test_weights_that_are_said_to_be_unpacked_are_those_that_transformers_unpacks_when_asked() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    for method, name in _UNPACKED_BY.items():
        kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)  # older versions lack the newest
        assert kind is None or (kind.__name__, kind(dequantize=True).dequantize) == (name, True)


@pytest.mark.parametrize("load_in", ["4bit", "8bit"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_shares_the_weights_of_the_embeddings_where_the_model_ties_them(
    tmp_path: Path, load_in: LoadIn, tied: bool
) -> None:
    raw = TINY_CONFIG | {"tie_word_embeddings": tied}
    spec = replace(tiny_trial(tmp_path, 1, rung="zero0"), load_in=load_in, model_config_json=raw)
    config = model_config(raw)
    model = quantised_model(auto_class(config, "causal-lm"), config, spec, torch.bfloat16)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is table.weight) == tied


def kept_by_forward(tmp_path: Path, load_in: LoadIn | None, layers: int) -> int:
    """Bytes of all tensors that Python can see more of after a checkpointed forward pass than before it."""
    raw = TINY_CONFIG | {"num_hidden_layers": layers}
    spec = replace(
        tiny_trial(tmp_path, 1, rung="zero0"),
        load_in=load_in,
        model_config_json=raw,
        lora=Lora(rank=2, targets=("q_proj",)).for_peft(),
    )
    model: Any = build_model(spec, torch.bfloat16, "cpu").to(torch.bfloat16)  # adapters too, as DeepSpeed's engine does
    model.enable_input_require_grads()
    set_checkpointing(model, from_plain(CandidateSpec, asdict(spec.candidates[0]) | {"checkpoint_every": 1}))
    ids = torch.randint(4, 100, (1, TOKENS))
    model(input_ids=ids).logits.sum().backward()  # the first pass packs and moves things around
    before = visible_bytes()
    output = model(input_ids=ids)
    assert output.logits.requires_grad
    return visible_bytes() - before


def visible_bytes() -> int:
    gc.collect()
    with warnings.catch_warnings(action="ignore"):  # of torch's old names, which looking at them calls up
        found = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and not each.is_meta]
        found = [each for each in found if not isinstance(each, FakeTensor)]  # of what another test compiled
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}.values())


@pytest.mark.parametrize("load_in", [None, "4bit", "8bit"])
def test_checkpointed_blocks_keep_their_inputs_and_in_8_bits_those_of_their_layers(
    tmp_path: Path, load_in: LoadIn | None
) -> None:
    model = replace(TINY, num_layers=4)
    workload = Workload(
        model=model,
        task="causal-lm",
        seq_len=TOKENS,
        global_batch_size=1,
        lora=Lora(rank=2, targets=("q_proj",)),
        load_in=load_in,
    )
    candidate = replace(make_candidate("zero0", checkpointing=True), micro_batch=1)
    more, fewer = (kept_by_forward(tmp_path, load_in, layers) for layers in (4, 2))
    predicted = activations_of(workload, candidate).kept / 4
    of_a_block = (more - fewer) / 2 - torch.get_rng_state().nbytes  # which checkpointing keeps too, on the host
    assert predicted == pytest.approx(of_a_block, rel=0.02)
