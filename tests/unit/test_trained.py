"""What of a model is trained: adapters, quantised and frozen weights, and what they change in the predictions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import bundled_workload, make_candidate
from helpers.scripts import make_script
from helpers.shapes import SMALL

from ladder.backends.activations import activations_of
from ladder.backends.base import START
from ladder.backends.registry import backend_of
from ladder.errors import UsageError
from ladder.machine.machine_speed import flops_per_token, machine_speed
from ladder.workload.lora import Lora, lora_from_file, lora_from_mapping, lora_from_text
from ladder.workload.shapes import shape_from_config
from ladder.workload.source import resolve_model
from ladder.workload.trained import LoadIn, check_trained, freeze_pattern
from ladder.workload.workload import Workload

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


def test_only_adapters_are_trained_and_the_rest_keeps_its_bytes() -> None:
    weights = workload(lora=ADAPTERS).weights
    # Per block: q and o 2048 + 2048, k and v 2048 + 512, gate, up and down 2048 + 8192; rank 16; 16 blocks.
    assert weights.trained == 16 * 16 * (2 * 4096 + 2 * 2560 + 3 * 10240)
    assert weights.total == LLAMA.num_parameters + weights.trained
    assert weights.bytes_held == 2 * weights.total
    assert not weights.trains_head
    assert len(weights.adapted) == 7


def test_quantised_linear_layers_hold_half_a_byte_each_and_the_embeddings_two() -> None:
    weights = workload(lora=ADAPTERS, load_in="4bit").weights
    embeddings = LLAMA.vocab_size * LLAMA.hidden_size
    assert weights.quantised == pytest.approx(LLAMA.num_parameters - embeddings, rel=1e-3)
    assert weights.bytes_held == pytest.approx(0.516 * weights.quantised + 2 * (embeddings + weights.trained), rel=1e-3)


def test_frozen_layers_at_the_bottom_need_no_backward_pass() -> None:
    frozen = workload(freeze=("model.embed_tokens", "model.layers.[0-11]"))
    assert frozen.weights.reached_blocks == 0.25
    assert frozen.weights.trained_blocks == 0.25
    assert flops_per_token(frozen) < 0.55 * flops_per_token(workload())


def test_a_frozen_embedding_alone_leaves_all_blocks_as_they_are() -> None:
    weights = workload(freeze=("model.embed_tokens",)).weights
    assert (weights.reached_blocks, weights.trained_blocks) == (1.0, 1.0)
    assert weights.trained == LLAMA.num_parameters - LLAMA.vocab_size * LLAMA.hidden_size


@pytest.mark.parametrize("rung", ["zero0", "zero2", "zero3"])
def test_adapters_have_no_states_for_frozen_weights(rung: str) -> None:
    candidate = make_candidate(rung)

    def at_rest(trained: Workload) -> float:
        moment = backend_of(candidate.engine.rung).moments(trained, candidate, 2, "cuda")[0]
        return moment.parameters + moment.optimizer + moment.gradients

    adapters = workload(lora=ADAPTERS)
    ranks = 1 if rung == "zero0" else 2
    held = adapters.weights.bytes_held / (2 if rung == "zero3" else 1)
    states = 14 if rung == "zero3" else 12
    assert at_rest(adapters) == pytest.approx(held + states * adapters.weights.trained / ranks, rel=1e-3)
    assert at_rest(adapters) < at_rest(workload()) / 3


def test_frozen_blocks_keep_less_for_backward_but_what_adapters_read() -> None:
    candidate = make_candidate("zero0", checkpointing=False)

    def kept(trained: Workload) -> float:
        return backend_of(candidate.engine.rung).moments(trained, candidate, 1, "cuda")[1].activations

    everywhere, attention = workload(lora=ADAPTERS), workload(lora=Lora(rank=16, targets=("q_proj", "v_proj")))
    assert kept(attention) < kept(everywhere) < kept(workload())
    assert kept(workload(lora=Lora(rank=16, dropout=0.1))) > kept(everywhere)


def test_the_host_waits_for_each_gradient_at_stage_2_alone() -> None:
    machine = machine_speed("NVIDIA H200", "cuda", 1, 16)

    def launch(rung: str, trained: Workload) -> float:
        candidate = make_candidate(rung, checkpointing=False)
        return backend_of(candidate.engine.rung).step_terms(trained, candidate, 1, machine).launch

    # A and B of seven layers in each block; seven matrices and two norms.
    for trained, tensors in ((workload(lora=ADAPTERS), 2 * 7), (workload(), 7 + 2)):
        more = launch("zero2", trained) - launch("zero1", trained)
        assert more == pytest.approx(0.15e-3 * tensors * LLAMA.num_layers)


def test_the_fingerprint_changes_with_what_is_trained() -> None:
    kinds = [workload(), workload(lora=ADAPTERS), workload(lora=Lora()), workload(lora=ADAPTERS, load_in="4bit")]
    assert len({each.fingerprint() for each in kinds}) == 4
    assert workload(freeze=("model.layers.0",)).fingerprint() != workload().fingerprint()


MIXTURE = shape_from_config(
    SMALL | {"model_type": "mixtral", "num_local_experts": 8, "num_key_value_heads": 2}, name="mixture", source="file"
)


def test_the_few_outputs_of_a_router_bound_no_rank() -> None:
    check_trained(MIXTURE, Lora(rank=16), None, ())


@pytest.mark.parametrize("name", ["dropout", "dora"])
def test_what_peft_cannot_do_with_experts_is_refused(name: str) -> None:
    lora = Lora(dropout=0.1) if name == "dropout" else Lora(dora=True)
    with pytest.raises(UsageError, match=f"--lora {name}: peft has none for experts"):
        check_trained(MIXTURE, lora, None, ())
    check_trained(MIXTURE, replace(lora, targets=("q_proj",)), None, ())


def test_a_module_without_a_name_is_not_frozen() -> None:
    with pytest.raises(UsageError, match="--freeze needs the name of a module"):
        check_trained(LLAMA, None, None, ("",))


def test_quantised_weights_are_whole_on_every_rank_before_stage_3_divides_them() -> None:
    adapters = workload(lora=ADAPTERS, load_in="4bit")
    candidate = make_candidate("zero3")
    moments = backend_of(candidate.engine.rung).moments(adapters, candidate, 8, "cuda")
    assert max(moment.parameters for moment in moments if moment.name == START) == pytest.approx(
        adapters.weights.bytes_held
    )


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


def test_layers_in_8_bits_keep_what_they_read_where_their_blocks_are_checkpointed_too() -> None:
    candidate = make_candidate("zero0")  # tests/contracts/test_quantised_models.py counts what it keeps
    tokens = candidate.micro_batch * workload().seq_len

    def kept(load_in: LoadIn) -> float:
        return activations_of(workload(lora=ADAPTERS, load_in=load_in), candidate).kept

    a_block = 2 * (3 * LLAMA.hidden_size + LLAMA.intermediate_size)
    assert kept("8bit") - kept("4bit") == tokens * LLAMA.num_layers * a_block


def test_a_block_is_recomputed_whole_however_many_below_it_are_frozen() -> None:
    candidate = make_candidate("zero0")
    frozen = workload(freeze=("model.embed_tokens", "model.layers.[0-11]"))
    assert activations_of(frozen, candidate).block == activations_of(workload(), candidate).block
    kept = activations_of(frozen, candidate).kept
    assert kept == pytest.approx(activations_of(workload(), candidate).kept / 4)


def test_a_mapping_of_peft_s_arguments_may_hold_nothing_else() -> None:
    assert lora_from_mapping({"r": 16, "lora_alpha": 32}) == Lora(rank=16, alpha=32)
    with pytest.raises(ValueError, match="rank is not among r, lora_alpha"):
        lora_from_mapping({"rank": 16})


def test_a_script_trains_what_it_was_seen_to_train_beside_its_adapters() -> None:
    more = make_script(num_parameters=10_000_000, num_trainable=4_000_000, lora=ADAPTERS.for_peft())
    assert workload(lora=ADAPTERS, script=more).weights.trained == 4_000_000
