"""What of a model is trained: adapters, quantised and frozen weights, and what they change in the predictions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import bundled_workload, make_candidate
from helpers.scripts import make_script
from helpers.searches import space_of
from helpers.shapes import SMALL, llama_like

from ladder.backends.activations import activations_of, terms_of
from ladder.backends.registry import backend_of
from ladder.backends.timing import token_seconds
from ladder.errors import UsageError
from ladder.machine.machine_speed import flops_per_token, machine_speed
from ladder.runs.snapshot import space_from_dict, space_to_dict
from ladder.workload.lora import Lora, lora_from_file, lora_from_text
from ladder.workload.shapes import shape_from_config
from ladder.workload.source import resolve_model
from ladder.workload.trained import LoadIn, check_trained, freeze_pattern
from ladder.workload.workload import CountedBlock, Workload

LLAMA = resolve_model("llama-3.2-1b")
ADAPTERS = Lora(rank=16)


def workload(**changes: Any) -> Workload:
    return replace(bundled_workload("llama-3.2-1b"), **changes)


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        ("r=16", Lora(rank=16)),
        ("rank=16,alpha=32,dropout=0.05", Lora(rank=16, alpha=32, dropout=0.05)),
        ("r=4,targets=q_proj,v_proj,alpha=8", Lora(rank=4, targets=("q_proj", "v_proj"))),
        ("lora_alpha=16, target_modules=all-linear", Lora(alpha=16)),
        ("r=8,rslora,dora=true", Lora(rslora=True, dora=True)),
        ("", Lora()),
    ],
)
def test_adapters_are_written_in_the_words_of_peft(text: str, lora: Lora) -> None:
    assert lora_from_text(text) == lora
    assert Lora.from_peft(lora.for_peft()) == lora


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("16", "16 is not NAME=VALUE"),
        ("r=many", "'many' is not a whole number"),
        ("bias=all", "bias is unknown"),
        ("rslora=maybe", "neither true nor false"),
        ("r=8,q_proj", "q_proj is not NAME=VALUE"),
    ],
)
def test_other_words_are_refused_with_the_one_that_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lora_from_text(text)


def adapter_file(folder: Path, **values: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["v_proj", "q_proj"], **values}))
    return path


def test_a_file_of_peft_gives_its_adapters(tmp_path: Path) -> None:
    path = adapter_file(tmp_path, base_model_name_or_path="meta-llama/Llama-3.2-1B", lora_alpha=32)
    expected = Lora(rank=4, alpha=32, targets=("q_proj", "v_proj"))
    assert lora_from_file(path, "llama-3.2-1b") == expected
    assert lora_from_file(tmp_path, "./models/Llama-3.2-1B/") == expected


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"base_model_name_or_path": "mistralai/Mistral-7B-v0.3"}, "is an adapter for mistralai/Mistral-7B-v0.3, not"),
        ({"peft_type": "IA3"}, "is not peft's adapter_config.json of a LoRA adapter"),
        ({"modules_to_save": ["lm_head"]}, "does not try adapters with modules_to_save"),
        ({"r": 0}, "r=0 is not a whole number of at least 1"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_sentence(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        lora_from_file(adapter_file(tmp_path, **values), "llama-3.2-1b")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"lora": Lora(targets=("query",))},
            "targets=query matches no linear layer of llama-3.2-1b; it has q_proj, k_",
        ),
        (
            {"lora": Lora(rank=1024)},
            r"r=1024 is more than k_proj of llama-3.2-1b has \(2048 × 512\); the most is r=512",
        ),
        ({"load_in": "4bit"}, "--load-in 4bit needs --lora"),
        ({"lora": Lora(), "freeze": ("model.embed_tokens",)}, "--freeze has no effect with --lora"),
        ({"freeze": ("encoder",)}, r"--freeze encoder matches nothing .* model.layers.\*.self_attn.q_proj"),
        ({"freeze": ("model",)}, "--freeze freezes all of llama-3.2-1b"),
        ({"freeze": ("",)}, "--freeze needs the name of a module"),
    ],
)
def test_what_a_model_cannot_have_is_refused_before_any_trial(settings: dict[str, Any], said: str) -> None:
    asked = {"lora": None, "load_in": None, "freeze": ()} | settings
    with pytest.raises(UsageError, match=said):
        check_trained(LLAMA, **asked)


def test_a_range_in_brackets_stands_for_its_numbers() -> None:
    pattern = freeze_pattern("model.layers.[0-11]")
    frozen = [layer for layer in range(16) if pattern.fullmatch(f"model.layers.{layer}.mlp.up_proj")]
    assert frozen == list(range(12))
    assert freeze_pattern("model.layers.*.mlp").fullmatch("model.layers.3.mlp.up_proj")
    assert not freeze_pattern("model.layers.1").fullmatch("model.layers.11")


def test_frozen_layers_at_the_bottom_need_no_backward_pass_and_a_frozen_embedding_alone_changes_no_block() -> None:
    bottom, table = workload(freeze=("model.embed_tokens", "model.layers.[0-11]")), workload(freeze=("*.embed_tokens",))
    assert (bottom.weights.reached_blocks, bottom.weights.trained_blocks) == (0.25, 0.25)
    assert (table.weights.reached_blocks, table.weights.trained_blocks) == (1.0, 1.0)
    assert bottom.weights.trained < table.weights.trained < LLAMA.num_parameters
    assert flops_per_token(bottom) < 0.55 * flops_per_token(workload())
    candidate = make_candidate("zero0")
    few, all_of_them = (activations_of(each, candidate) for each in (bottom, workload()))
    assert few.block == all_of_them.block, "a block is recomputed whole"
    assert few.kept < all_of_them.kept / 3


def test_frozen_blocks_keep_less_for_backward_but_what_adapters_read() -> None:
    def kept(**settings: Any) -> float:
        return activations_of(workload(**settings), make_candidate("zero0", checkpointing=False)).kept

    everywhere, attention = kept(lora=ADAPTERS), kept(lora=Lora(rank=16, targets=("q_proj", "v_proj")))
    assert attention < everywhere < kept()
    assert kept(lora=Lora(rank=16, dropout=0.1)) > everywhere
    on = make_candidate("zero0")  # layers in 8 bits hold what they read even where they are checkpointed
    in_4_bits, in_8_bits = (activations_of(workload(lora=ADAPTERS, load_in=bits), on).kept for bits in ("4bit", "8bit"))
    assert in_8_bits > 2 * in_4_bits


MIXTURE = shape_from_config(
    SMALL | {"model_type": "mixtral", "num_local_experts": 8, "num_key_value_heads": 2}, name="mixture", source="file"
)


@pytest.mark.parametrize("name", ["dropout", "dora"])
def test_what_peft_cannot_do_with_experts_is_refused(name: str) -> None:
    lora = Lora(dropout=0.1) if name == "dropout" else Lora(dora=True)
    check_trained(MIXTURE, Lora(rank=16), None, ())  # the few outputs of a router bound no rank
    with pytest.raises(UsageError, match=f"--lora {name}: peft has none for experts"):
        check_trained(MIXTURE, lora, None, ())
    check_trained(MIXTURE, replace(lora, targets=("q_proj",)), None, ())


@pytest.mark.parametrize(
    ("load_in", "rung", "said"),
    [
        ("4bit", "zero3", ""),
        ("8bit", "zero3", "--load-in 4bit can be divided"),
        ("4bit", "zero3+param-cpu", "take a rung without param-cpu or param-nvme, as zero3"),
        ("8bit", "zero3+param-cpu", "--load-in 4bit can be divided"),
        ("8bit", "zero2+opt-cpu", ""),
    ],
)
def test_a_rung_that_cannot_have_quantised_weights_says_what_can(load_in: LoadIn, rung: str, said: str) -> None:
    engine = make_candidate(rung).engine
    why = backend_of(engine.rung).obstacle(workload(lora=ADAPTERS, load_in=load_in), engine.rung)
    assert why.endswith(said)
    assert bool(why) == bool(said)


def test_a_script_trains_what_it_was_seen_to_train_beside_its_adapters() -> None:
    more = make_script(num_parameters=10_000_000, num_trainable=4_000_000, lora=ADAPTERS.for_peft())
    assert workload(lora=ADAPTERS, script=more).weights.trained == 4_000_000


# What transformers' own code was counted to do in a block takes the place of formulas.

SEQ_LEN = 256
BLOCK = CountedBlock(
    kept=20000.0,
    kept_by_length=4.0,
    kept_for_weights=6000.0,
    moved=70000.0,
    moved_by_length=8.0,
    kernels=107.0,
    tensors=7.5,
)


def counted(block: CountedBlock | None = BLOCK, lora: Lora | None = None) -> Workload:
    usual = llama_like(4, hidden=256, intermediate=512, heads=4, seq_len=SEQ_LEN, lora=lora)
    return replace(usual, model=replace(usual.model, block=block))


LAYERS_ALONE = make_candidate("zero0", checkpointing=False, micro_batch=2)


def test_a_block_keeps_and_moves_what_was_counted_for_its_length() -> None:
    more = replace(BLOCK, kept=2 * BLOCK.kept, kept_by_length=2 * BLOCK.kept_by_length, moved=2 * BLOCK.moved)
    kept, doubled = (activations_of(counted(block), LAYERS_ALONE).kept for block in (BLOCK, more))
    assert doubled == pytest.approx(2 * kept)
    moved, doubled = (terms_of(counted(block), LAYERS_ALONE, 1).traffic for block in (BLOCK, more))
    assert 1.9 * moved < doubled < 2 * moved
    assert counted().tensors_of_a_block == 7.5
    space = space_of(workload=counted())
    assert space_from_dict(json.loads(json.dumps(space_to_dict(space)))) == space, "a run folder keeps it"


def test_a_block_with_as_many_kernels_as_a_llama_block_is_launched_as_fast() -> None:
    assert terms_of(counted(), LAYERS_ALONE, 1).launches == pytest.approx(1.0, rel=0.01)
    twice = replace(BLOCK, kernels=2 * BLOCK.kernels)
    assert terms_of(counted(twice), LAYERS_ALONE, 1).launches == pytest.approx(1.5, rel=0.02)


def test_products_in_32_bits_and_attention_with_a_mask_make_a_token_take_longer() -> None:
    machine = machine_speed("NVIDIA H200", "cuda", 1, 16)

    def seconds(block: CountedBlock) -> float:
        return token_seconds(counted(block), LAYERS_ALONE, machine, terms_of(counted(block), LAYERS_ALONE, 1))

    assert seconds(replace(BLOCK, flops_32=1e6, flops_32_by_length=1e3)) > 1.1 * seconds(BLOCK)
    assert seconds(replace(BLOCK, masked=256.0)) > 1.01 * seconds(BLOCK)
