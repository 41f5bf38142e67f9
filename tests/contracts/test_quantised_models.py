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
from helpers.saved_bytes import kept_by
from torch._subclasses import FakeTensor

from ladder.backends.plain.backend import PLAIN
from ladder.backends.plain.step import weights_bytes
from ladder.backends.registry import MAIN
from ladder.events.as_json import from_plain
from ladder.events.step_policy import CandidateSpec
from ladder.step.walk import kept
from ladder.trial.count import counted
from ladder.trial.model import build_model, set_checkpointing
from ladder.trial.model_class import auto_class, model_config
from ladder.trial.quantised import quantised_model
from ladder.trial.script.facts import model_facts
from ladder.workload.config_guard import _UNPACKED_BY
from ladder.workload.counted import counted_from
from ladder.workload.lora import Lora
from ladder.workload.shapes import shape_from_config
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
    workload = Workload(
        model=TINY,
        task="causal-lm",
        seq_len=TOKENS,
        global_batch_size=1,
        lora=Lora(rank=2, targets=("q_proj",)),
        load_in=load_in,
    )
    candidate = replace(make_candidate("zero0", checkpointing=True), micro_batch=1)
    more, fewer = (kept_by_forward(tmp_path, load_in, layers) for layers in (4, 2))
    predicted = kept(MAIN.assignment(workload, candidate, 1)) / TINY.num_layers
    of_a_block = (more - fewer) / 2 - torch.get_rng_state().nbytes  # which checkpointing keeps too, on the host
    assert predicted == pytest.approx(of_a_block, rel=0.02)


_SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128}
PREPARED: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "intermediate_size": 256},
    "opt": {"model_type": "opt", "ffn_dim": 256, "word_embed_proj_dim": 64, "dropout": 0.0},
    "gemma2": {"model_type": "gemma2", "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 16},
}


@pytest.mark.parametrize("prepare_kbit", [True, False])
@pytest.mark.parametrize("rung", ["ddp", "fsdp2"])  # which store packed weights otherwise
def test_a_look_sees_by_the_weights_whether_a_model_was_prepared(tmp_path: Path, rung: str, prepare_kbit: bool) -> None:
    spec = replace(tiny_trial(tmp_path, 1, rung=rung), load_in="4bit", prepare_kbit=prepare_kbit)
    model = build_model(replace(spec, lora=Lora(rank=2).for_peft()), torch.bfloat16, "cpu")
    facts = model_facts(model)
    assert (facts["load_in"], facts["prepare_kbit"]) == ("4bit", prepare_kbit)


def of_prepared(tmp_path: Path, workload: Workload, layers: int) -> tuple[int, float]:
    """Bytes that autograd saves under autocast beside weights, and those of the weights, as bitsandbytes packs them."""
    spec = replace(
        tiny_trial(tmp_path, 1, rung="ddp"),
        load_in="4bit",
        prepare_kbit=True,
        model_config_json={**workload.model.config, "num_hidden_layers": layers},
        lora=workload.lora.for_peft() if workload.lora is not None else None,
    )
    model: Any = build_model(spec, torch.bfloat16, "cpu")
    ids = torch.randint(4, 100, (1, TOKENS))
    kept = kept_by(model, lambda: model(input_ids=ids).logits, autocast=True)
    packed = {each for each in model.parameters() if hasattr(each, "quant_state")}
    unpacked = sum(each.nbytes for each in model.parameters() if each not in packed)
    return kept, unpacked + sum(2 * each.numel() for each in packed) * 4.127 / 8


@pytest.mark.parametrize("family", PREPARED)
def test_a_prepared_model_takes_and_keeps_what_is_counted(tmp_path: Path, family: str) -> None:
    shape = shape_from_config(
        _SIZES | PREPARED[family],
        name=family,
        source="file",
        count=lambda config, task, _: counted_from(counted(dict(config), task)),
    )
    workload = Workload(
        model=shape,
        task="causal-lm",
        seq_len=TOKENS,
        global_batch_size=1,
        lora=Lora(rank=4),
        load_in="4bit",
        prepare_kbit=True,
    )
    (more, _), (fewer, weights) = (of_prepared(tmp_path, workload, layers) for layers in (4, 2))
    copies = 2 * workload.weights.trained / 2  # of a block's adapters, which autocast casts
    candidate = replace(make_candidate("ddp", checkpointing=False), micro_batch=1)
    predicted = kept(PLAIN.assignment(workload, candidate, 1)) / 2
    assert predicted == pytest.approx((more - fewer) / 2 - copies, rel=0.01)
    assert weights_bytes(workload) == pytest.approx(weights, rel=1e-6)
