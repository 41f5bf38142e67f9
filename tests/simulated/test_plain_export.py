"""`ladder export` of an answer without DeepSpeed: each program's own words for DDP and FSDP2, or why it has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.answers import answer

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.emit import emit_all
from ladder.emit.config import load_best_config
from ladder.emit.exporters.registry import exported
from ladder.errors import UsageError
from ladder.techniques.keys import engine_named
from ladder.workload.lora import Lora

ADAPTERS = {"lora": Lora(rank=8)}
QLORA = {**ADAPTERS, "load_in": "4bit"}


def text_for(folder: Path, target: str, engine: str, workload: dict[str, Any] | None = None) -> str:
    """What an answer of `engine`, written and read again, is in the words of `target`."""
    usual = answer("zero1", workload=workload)
    found = replace(usual, candidate=replace(usual.candidate, engine=engine_named(engine)))
    emit_all(found, folder / "best_config.json")
    written = folder / "best_plain.json"
    return exported(load_best_config(written), written, target)


def words_for(folder: Path, target: str, engine: str, workload: dict[str, Any] | None = None) -> dict[str, Any]:
    words: dict[str, Any] = yaml.safe_load(text_for(folder, target, engine, workload))
    return words


def test_trl_names_accelerates_file_and_the_type_of_weights_that_was_measured(tmp_path: Path) -> None:
    words = words_for(tmp_path, "trl", "fsdp2")
    assert words["accelerate_config"] == str(tmp_path / "best_plain.accelerate.yaml")
    assert words["dtype"] == "float32"
    assert not {"deepspeed", "fsdp", "fsdp_config"} & words.keys(), "accelerate's file has them"
    packed = words_for(tmp_path, "trl", "fsdp2", QLORA)
    assert (packed["dtype"], packed["bnb_4bit_quant_storage"]) == ("bfloat16", "bfloat16")
    assert "bnb_4bit_quant_storage" not in words_for(tmp_path, "trl", "ddp", QLORA)


def test_axolotl_shards_adapters_in_its_own_words_and_says_why_it_trains_no_whole_model(tmp_path: Path) -> None:
    words = words_for(tmp_path, "axolotl", "fsdp2+no-reshard", ADAPTERS)
    assert words["fsdp_version"] == 2
    assert words["fsdp_config"]["reshard_after_forward"] is False
    assert words["fsdp_config"]["offload_params"] is False
    assert "deepspeed" not in words
    assert "fsdp_config" not in words_for(tmp_path, "axolotl", "ddp", ADAPTERS)
    with pytest.raises(UsageError, match=r"without the fp32 masters .* use --for trl"):
        text_for(tmp_path, "axolotl", "fsdp2")


@pytest.mark.parametrize("target", ["trl", "axolotl", "llama-factory"])
def test_programs_that_leave_norms_in_16_bits_do_not_get_an_answer_that_peft_prepared(
    tmp_path: Path, target: str
) -> None:
    prepared = {**QLORA, "prepare_kbit": True}
    with pytest.raises(UsageError, match=r"were measured in fp32; use --for trainer"):
        text_for(tmp_path, target, "ddp", prepared)
    assert words_for(tmp_path, "trainer", "ddp", prepared)
    script = " ".join((tmp_path / "best_plain.launch.sh").read_text().split())
    assert "all others in fp32 (peft.prepare_model_for_kbit_training)" in script
    assert "call peft.prepare_model_for_kbit_training(model) and peft.get_peft_model(" in script


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp2+cpu"])
def test_llama_factory_gets_the_trainers_arguments(tmp_path: Path, engine: str) -> None:
    words, rung = words_for(tmp_path, "llama-factory", engine), RUNGS_BY_NAME[engine]
    assert "deepspeed" not in words
    assert ("fsdp" in words) == (rung.stage > 0)
    if rung.stage:
        assert words["fsdp_config"]["version"] == 2
        assert words["fsdp_config"]["cpu_offload"] == (engine == "fsdp2+cpu")


def test_scripts_for_torchrun_and_slurm_name_no_file_of_deepspeed(tmp_path: Path) -> None:
    for target in ("torchrun", "sbatch"):
        text = text_for(tmp_path, target, "fsdp2+compile")
        assert "deepspeed" not in text
        assert " --fsdp --fsdp_config " in text
        assert "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true" in text
    assert "--gradient_accumulation_steps 2" in text
