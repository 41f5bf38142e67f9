"""What transformers counts of a model that ladder does not know is exact, and agrees with what ladder knows."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_candidate
from helpers.families import COUNTED
from helpers.families import FAMILIES as OTHERS
from helpers.saved_bytes import kept_by
from helpers.shapes import SMALL
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ladder import launch
from ladder.backends.registry import MAIN
from ladder.errors import ModelNotAccessibleError, UsageError
from ladder.launch.counting import asked_of, counting
from ladder.step.walk import kept
from ladder.trial import count_block, count_kernels
from ladder.trial.count import TooLong, at_most, counted
from ladder.trial.model_class import model_config
from ladder.workload.counted import Counted, counted_from, shipped
from ladder.workload.lora import Lora, lora_from_mapping, lora_from_text
from ladder.workload.shapes import depth_of, shape_from_config, with_adapters, with_layers, with_vocabulary
from ladder.workload.source import resolve_model
from ladder.workload.workload import CountedBlock, ModelShape, Task, Workload

SIZES = (*COUNTED, "num_layers", "tied")


@cache
def counted_once(config: str, task: Task | None) -> dict[str, Any]:
    """What is counted of a configuration as JSON; each takes a second or more."""
    return counted(json.loads(config), task)


def count(config: Any, task: Task | None, lora: Mapping[str, Any] | None = None) -> Counted:
    """As `counting` does, in this process."""
    if lora is not None:
        return counted_from(counted(dict(config), task, lora=lora))
    return counted_from(counted_once(json.dumps(dict(config)), task))


def shape_of(config: dict[str, Any], task: Task | None = None) -> ModelShape:
    return shape_from_config(config, name="small", source="file", task=task, count=count)


@pytest.mark.parametrize("name", ["tiny-llama", pytest.param("gemma-3-1b", marks=pytest.mark.night)])
def test_what_is_shipped_of_a_bundled_model_is_what_counting_finds_today(name: str) -> None:
    known = resolve_model(name)
    found = counted(dict(known.config), None, json.loads(asked_of(known.config, None))["replacing"])
    assert found["tasks"][0] == known.task
    kept = shipped(known.config, None)
    assert kept is not None
    assert kept.sizes is not None
    installed = found["sizes"]["blocks_with"].keys()
    others = {name: block for name, block in kept.sizes["blocks_with"].items() if name in installed}
    assert found["sizes"] == {**kept.sizes, "blocks_with": others}


def test_layers_that_share_a_block_keep_as_much_as_layers_of_their_own() -> None:
    four, two = shape_of(OTHERS["albert"]), shape_of(OTHERS["albert"] | {"num_hidden_layers": 2})
    assert four.block is not None
    assert two.block is not None
    assert four.block.kept == pytest.approx(two.block.kept, rel=0.01)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo2", "phi", "qwen3", "gpt_neox", "phi3", "opt"])
def test_what_a_frozen_block_with_adapters_keeps_is_what_its_own_code_keeps(family: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = SMALL | {"vocab_size": 1000, "num_key_value_heads": 4, "head_dim": 16, "model_type": family}
    sizes = AutoConfig.for_model(
        family, **{key: value for key, value in sizes.items() if key != "model_type"}
    ).to_dict()
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(model_config(sizes)).to(torch.bfloat16)
        adapted = get_peft_model(plain, LoraConfig(r=8, target_modules="all-linear")).to(torch.bfloat16)
    blocks = [module for name, module in plain.named_modules() if name.endswith(tuple(f"layers.{n}" for n in range(9)))]
    adapted.enable_input_require_grads()
    one, two = (
        count_block.of_step(adapted, dict.fromkeys(blocks, 1), number, 64, backward=False).kept for number in (1, 2)
    )
    model = shape_of(sizes)
    workload = Workload(model=model, task="causal-lm", seq_len=64, global_batch_size=1, lora=Lora(rank=8))
    candidate = make_candidate("zero0", checkpointing=False, micro_batch=1)
    assert kept(MAIN.assignment(workload, candidate, 1)) == pytest.approx(two - one, rel=0.02)


GPT_NEO = {
    "model_type": "gpt_neo",
    "hidden_size": 64,
    "num_layers": 4,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 2]],
    "vocab_size": 1000,
}
FALCON = {
    "model_type": "falcon",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "alibi": True,
}


@pytest.mark.parametrize(
    ("config", "of_scores_in_32_bits", "masked"),
    [(GPT_NEO, 6 * 64, 0), (FALCON, 0, 64), (SMALL | {"model_type": "olmo", "vocab_size": 1000}, 0, 0)],
    ids=["scores in 32 bits", "a bias for each pair of positions", "causal attention"],
)
def test_products_in_32_bits_and_attention_with_a_mask_are_counted(
    config: dict[str, Any], of_scores_in_32_bits: int, masked: int
) -> None:
    block = shape_of(config).block
    assert block is not None
    assert (block.flops_32, block.flops_32_by_length, block.masked) == (0, of_scores_in_32_bits, masked)


def test_a_product_for_each_head_without_much_arithmetic_counts_by_the_bytes_that_it_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_products = shape_of(GPT_NEO).block
    monkeypatch.setattr(count_kernels, "_ENOUGH", 0.0)
    without = CountedBlock(**counted(GPT_NEO, None)["sizes"]["block"])
    assert with_products is not None
    of_weights_and_values = 4 * 3 * 2
    assert with_products.moved_by_length - without.moved_by_length == of_weights_and_values
    assert with_products.moved > without.moved


def test_a_block_that_is_left_out_at_random_is_counted_as_one_that_runs() -> None:
    m2m = {key: value for key, value in OTHERS["bart"].items() if key != "architectures"} | {"model_type": "m2m_100"}
    often = counted(m2m | {"encoder_layerdrop": 0.9, "decoder_layerdrop": 0.9}, None)
    assert often["sizes"]["block"] == counted(m2m, None)["sizes"]["block"]


def test_a_block_whose_code_is_called_past_its_hooks_is_not_counted_and_the_shape_says_so() -> None:
    squeezebert = {"model_type": "squeezebert", "vocab_size": 1000, "num_hidden_layers": 2}
    shape = shape_of(squeezebert)
    assert shape.block is None
    assert "could not be counted" in shape.note


def test_code_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(TooLong), at_most(0.01):
        sum(each for each in itertools.count())


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "head_dim": 16}
WITH_A_STATE: dict[str, dict[str, Any]] = {
    "mamba": {"num_hidden_layers": 2},
    "mamba2": {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 64},
    "qwen3_next": {"num_hidden_layers": 4, **HEADS, "num_experts": 4, "num_experts_per_tok": 2}
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "recurrent_gemma": {"num_hidden_layers": 3, **HEADS, "lru_width": 64, "attention_window_size": 512},
}


@pytest.mark.parametrize("kind", WITH_A_STATE)
def test_what_layers_with_a_state_keep_is_counted_in_each_numerics_as_their_code_keeps_it(kind: str) -> None:
    raw = {"model_type": kind, "hidden_size": 64, "vocab_size": 100, "pad_token_id": 0, **WITH_A_STATE[kind]}
    shape = shape_of(raw)
    assert shape.block is not None
    assert "layers with a state" in shape.note
    told = shape.block.kept, shape.block.kept_wide, shape.block.kept_in_32_bits
    seen = [
        kept_by_a_token(raw, dtype, autocast)
        for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True), (torch.float32, False))
    ]
    assert [each * shape.num_layers for each in told] == pytest.approx(seen, rel=0.06)


def kept_by_a_token(raw: dict[str, Any], dtype: torch.dtype, autocast: bool) -> float:
    """Bytes of a token of one more sequence that a real forward pass keeps, without the head."""
    model = AutoModelForCausalLM.from_config(model_config(raw)).to(dtype).train()

    def kept(sequences: int) -> int:
        ids = torch.randint(1, 100, (sequences, 256))
        return kept_by(model, lambda: model.base_model(input_ids=ids)[0], autocast=autocast)

    return (kept(2) - kept(1)) / 256


def test_a_model_with_a_small_vocabulary_pads_with_none_of_the_tokens_that_it_lacks() -> None:
    modernbert = {"model_type": "modernbert", "vocab_size": 1000}
    assert model_config(modernbert).pad_token_id is None
    assert model_config(modernbert | {"pad_token_id": 7}).pad_token_id == 7


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_has_as_many_parameters_and_layers_as_transformers_builds(name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM
    from transformers import AutoModelForSeq2SeqLM as AutoModelForSeq2Seq

    shape = shape_of(OTHERS[name])
    config = model_config(OTHERS[name])
    autos = (AutoModelForSeq2Seq, AutoModelForMaskedLM, AutoModelForImageTextToText, AutoModelForCausalLM)
    model = next(auto for auto in autos if type(config) in auto._model_mapping).from_config(config)
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert (shape.num_parameters, shape.largest_parameter) == (sum(sizes), max(sizes))
    assert depth_of(shape) == 4
    assert (shape.hidden_size, shape.vocab_size) == (64, 1000)


def test_a_model_with_fewer_layers_is_one_that_transformers_builds() -> None:
    for name in OTHERS.keys() - {"mamba", "jamba"}:  # whose code goes from token to token, which takes long
        shape = shape_of(OTHERS[name])
        two = with_layers(shape, 2)
        again = shape_of(dict(two.config))
        assert two.num_layers == again.num_layers
        assert two.num_parameters == pytest.approx(again.num_parameters, rel=0.2)  # layers may differ
        assert shape_of(dict(with_vocabulary(shape, 500).config)).vocab_size == 500


def test_a_token_meets_the_active_experts_alone() -> None:
    moe = SMALL | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    shape, expert = shape_of(moe), 3 * 64 * 96
    idle = 3 * 6 * expert
    norms, table = (2 * 3 + 1) * 64, 64 * 100
    assert shape.num_matmul_parameters == shape.num_parameters - idle - norms - table
    assert shape.largest_parameter == 8 * 2 * 96 * 64


def test_a_token_goes_through_a_shared_block_as_often_as_there_are_layers() -> None:
    four, two = shape_of(OTHERS["albert"]), shape_of(OTHERS["albert"] | {"num_hidden_layers": 2})
    assert four.num_parameters == two.num_parameters == with_layers(four, 2).num_parameters
    block = 4 * 64 * 64 + 2 * 64 * 96
    assert four.num_matmul_parameters - two.num_matmul_parameters == 2 * block
    assert with_layers(four, 2).num_layers == 2


def test_the_tower_for_images_is_trained_but_no_token_is_multiplied_with_it() -> None:
    small, large = (
        shape_of(OTHERS["llava"] | {"vision_config": OTHERS["llava"]["vision_config"] | {"num_hidden_layers": layers}})
        for layers in (2, 4)
    )
    assert large.num_parameters > small.num_parameters
    assert large.num_matmul_parameters == small.num_matmul_parameters
    assert large.num_layers == small.num_layers


def test_the_usual_task_is_that_of_the_family_and_another_one_that_it_has_can_be_asked_for() -> None:
    assert shape_of(OTHERS["electra"]).task == "masked-lm"
    assert shape_of(OTHERS["electra"], "causal-lm").task == "causal-lm"
    assert shape_of(OTHERS["electra"] | {"architectures": ["ElectraForCausalLM"]}).task == "causal-lm"
    with pytest.raises(UsageError, match="'albert' model is trained as masked-lm, not as causal-lm; leave --task out"):
        shape_of(OTHERS["albert"], "causal-lm")


@pytest.mark.parametrize(
    ("model_type", "lora"),
    [
        ("qwen2", {"modules_to_save": ["lm_head"]}),
        ("qwen2", {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ["q_proj", "v_proj"]}),
        ("qwen2", {"target_modules": r".*layers\.[01]\.self_attn\.(q|v)_proj"}),
        ("qwen2", {"layers_to_transform": [1], "target_modules": ["q_proj", "down_proj"]}),
        ("qwen2", {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7}, "use_dora": True}),
        ("qwen2", {"exclude_modules": ["down_proj"]}),
        ("qwen2", {"bias": "lora_only", "target_modules": ["q_proj"]}),
        ("mixtral", {"modules_to_save": ["lm_head"]}),
        ("mixtral", {"target_parameters": ["experts.gate_up_proj"], "target_modules": ["q_proj"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_adapters_train_is_what_peft_trains_by_any_of_its_arguments(model_type: str, lora: dict[str, Any]) -> None:
    config = SMALL | {"model_type": model_type, "num_local_experts": 4, "tie_word_embeddings": False}
    asked = lora_from_mapping({"r": 4, "target_modules": "all-linear", **lora})
    model = with_adapters(shape_of(config), asked, count)
    weights = Workload(model=model, task="causal-lm", seq_len=16, global_batch_size=1, lora=asked).weights
    with torch.device("meta"):
        adapted = get_peft_model(
            AutoModelForCausalLM.from_config(model_config(config)),
            LoraConfig(**{"r": 4, "target_modules": "all-linear", **lora}),
        )
    assert weights.trained == sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    assert weights.trains_head == ("lm_head" in lora.get("modules_to_save", ()))
    assert weights.reached_blocks == pytest.approx(2 / 3 if "layers_to_transform" in lora else 1)


def test_adapters_that_peft_does_not_take_are_refused_in_its_words() -> None:
    with pytest.raises(UsageError, match=r"targets=nothing_of_it matches no linear layer"):
        with_adapters(shape_of(SMALL), lora_from_text("modules_to_save=lm_head,targets=nothing_of_it"), count)
    with pytest.raises(
        UsageError, match=r"peft does not take these adapters for 'small': .*Error: Target modules nothing"
    ):
        with_adapters(shape_of(SMALL), lora_from_mapping({"target_modules": "nothing.*"}), count)


def test_what_transformers_counts_is_kept_and_what_it_does_not_know_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LADDER_CACHE", str(tmp_path))
    notes: list[str] = []
    ask = counting(notes.append)
    first = ask(OTHERS["distilbert"], None, None)
    assert notes == ["Counting what model type 'distilbert' has with transformers, once."]
    assert first == count(OTHERS["distilbert"], None)
    assert ask(SMALL | {"model_type": "brandnew"}, None, None).spellings == ()
    (of_distilbert, *_) = [file for file in tmp_path.rglob("*.json") if "masked-lm" in file.read_text()]
    kept = of_distilbert.read_text()
    monkeypatch.setattr(sys, "executable", "/no/such/python")  # nothing is started for what was counted
    assert ask(OTHERS["distilbert"], None, None) == first
    of_distilbert.write_text("{")  # what is damaged is counted again
    with monkeypatch.context() as patch:
        patch.setattr(launch.counting, "ask", lambda _: json.loads(kept))
        assert ask(OTHERS["distilbert"], None, None) == first
    assert json.loads(of_distilbert.read_text()) == json.loads(kept)
    assert len(notes) == 3
    assert "without an answer" in ask(OTHERS["albert"], None, None).problem


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", "64"), ("num_attention_heads", 5), ("vocab_size", 10**30), ("hidden_size", -1)]
)
def test_a_configuration_that_cannot_be_built_is_refused_in_one_sentence(key: str, value: Any) -> None:
    with pytest.raises(ModelNotAccessibleError, match="cannot be used: transformers cannot build it") as refusal:
        shape_from_config(SMALL | {key: value}, name="small", source="file", count=counting())
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "most", "made_for"),
    [
        (SMALL | {"max_position_embeddings": 4096}, None, 4096),
        (OTHERS["distilbert"], 128, None),
        ({"model_type": "roberta", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}, 510, None),
        ({"model_type": "gptj", "n_embd": 64, "n_layer": 1, "n_head": 4, "rotary_dim": 8}, 2048, None),
        ({"model_type": "bloom", "hidden_size": 64, "n_layer": 1, "n_head": 4}, None, None),
    ],
    ids=["rotary", "learned", "after the padding's", "a table of sines", "none"],
)
def test_a_table_of_positions_is_a_limit_and_computed_positions_are_none(
    config: dict[str, Any], most: int | None, made_for: int | None
) -> None:
    shape = shape_of(config)
    assert (shape.max_positions, shape.made_for) == (most, made_for)
