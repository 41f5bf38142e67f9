"""Every rung gives a DeepSpeed configuration that is explicit, valid and the same as yesterday."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import bundled_workload

from ladder.backends.deepspeed.config import deepspeed_config, engine_knobs
from ladder.backends.deepspeed.rungs import RUNGS
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Engine, Rung, divisors
from ladder.errors import UsageError
from ladder.options.tune import check_rungs
from ladder.workload.workload import Workload

GOLDEN = Path(__file__).parents[1] / "golden" / "deepspeed-llama-2-7b"
NVME = Path("/nvme/swap")
WORLD_SIZE = 8
EVERY_RUNG = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)


def llama(**changes: Any) -> Workload:
    return bundled_workload("llama-2-7b", **{"seq_len": 2048, "global_batch_size": 128} | changes)


def config_of(rung: Rung, workload: Workload | None = None, world_size: int = WORLD_SIZE) -> dict[str, Any]:
    return deepspeed_config(
        workload or llama(), Engine(rung), micro_batch=2, accumulation=8, world_size=world_size, nvme_path=NVME
    )


def fields_of_deepspeed(module: str, class_name: str) -> set[str]:
    """Fields of one of DeepSpeed's own pydantic models, by alias too, read from its source: an import takes seconds."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.submodule_search_locations
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "runtime" / "zero" / module).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign)]
    keywords = [keyword for field in fields if isinstance(field.value, ast.Call) for keyword in field.value.keywords]
    aliases = {ast.literal_eval(keyword.value) for keyword in keywords if keyword.arg == "alias"}
    return aliases | {field.target.id for field in fields if isinstance(field.target, ast.Name)}


@EVERY_RUNG
def test_the_configuration_has_only_keys_that_deepspeed_knows(rung: Rung) -> None:
    zero = dict(config_of(rung)["zero_optimization"])
    for section, part in (("offload_optimizer", "Optimizer"), ("offload_param", "Param")):
        known = fields_of_deepspeed("offload_config.py", f"DeepSpeedZeroOffload{part}Config")
        assert set(zero.pop(section, {})) <= known
    assert set(zero) <= fields_of_deepspeed("config.py", "DeepSpeedZeroConfig")


@EVERY_RUNG
@pytest.mark.parametrize("changes", [{}, {"dtype": "fp16"}, {"optimizer": "sgd"}], ids=["adamw", "fp16", "sgd"])
def test_no_value_is_auto_or_absent_and_precision_and_optimizer_are_the_workload_s(
    rung: Rung, changes: dict[str, Any]
) -> None:
    config = config_of(rung, llama(**changes))
    text = json.dumps(config)
    assert not re.search(r'"auto"|\bnull\b', text)
    assert json.loads(text) == config
    assert config["fp16" if "dtype" in changes else "bf16"]["enabled"] is True
    assert not {"bf16" if "dtype" in changes else "fp16", "optimizer"} & set(config)
    assert config.get("zero_allow_untested_optimizer", False) is ("optimizer" in changes)


@EVERY_RUNG
def test_the_configuration_for_llama_2_7b_is_the_golden_one(rung: Rung) -> None:
    """UPDATE_GOLDEN=1 writes the files anew; read the diff."""
    path = GOLDEN / f"{rung.name}.json"
    text = json.dumps(config_of(rung), indent=2) + "\n"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text
    assert {path.stem for path in GOLDEN.glob("*.json")} == {rung.name for rung in RUNGS}


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("model", ["llama-2-7b", "opt-125m", "t0-3b"])
def test_an_nvme_buffer_holds_a_ranks_part_of_the_largest_parameter(model: str, world_size: int) -> None:
    workload = bundled_workload(model, task="seq2seq-lm" if model == "t0-3b" else "causal-lm")
    zero = config_of(RUNGS_BY_NAME["zero3+param-nvme+opt-nvme"], workload, world_size)["zero_optimization"]
    assert zero["offload_param"]["buffer_size"] * world_size >= workload.model.largest_parameter
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == str(NVME)
    with pytest.raises(ValueError, match="nvme_path"):
        deepspeed_config(
            workload,
            Engine(RUNGS_BY_NAME["zero3+opt-nvme"]),
            micro_batch=1,
            accumulation=1,
            world_size=1,
            nvme_path=None,
        )


@pytest.mark.parametrize(
    ("rung", "world_size", "overlaps"),
    [
        ("zero1", 1, False),
        ("zero2", 1, False),
        ("zero1", 2, True),
        ("zero2", 8, True),
        ("zero1+opt-cpu", 1, True),
        ("zero3", 1, True),
    ],
)
def test_one_rank_without_offload_does_not_overlap_a_reduction_that_it_does_not_have(
    rung: str, world_size: int, overlaps: bool
) -> None:
    engine = Engine(RUNGS_BY_NAME[rung])
    config = deepspeed_config(llama(), engine, micro_batch=1, accumulation=1, world_size=world_size, nvme_path=None)
    assert config["zero_optimization"]["overlap_comm"] is overlaps


@pytest.mark.parametrize("num_parameters", range(100_000_000, 100_000_016))
def test_buckets_are_even_as_deepspeed_asserts(num_parameters: int) -> None:
    workload = llama()
    workload = replace(workload, model=replace(workload.model, num_parameters=num_parameters))
    assert engine_knobs(workload, Engine(RUNGS_BY_NAME["zero2"]), 4)["allgather_bucket_size"] % 2 == 0


@pytest.mark.timeout(30)
def test_divisors_are_all_of_them_ascending_and_those_of_a_huge_number_are_found_at_once() -> None:
    assert [divisors(number) for number in (1, 7, 12)] == [[1], [1, 7], [1, 2, 3, 4, 6, 12]]
    assert divisors(10**12) == sorted(2**i * 5**j for i in range(13) for j in range(13))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("zero2+cpu", r"did you mean zero2\+opt-cpu, .* or .*\?"),
        ("dpp", r"did you mean ddp\?"),
        ("stages", r"choose from zero0, .*, fsdp2\+cpu\."),
    ],
)
def test_an_unknown_rung_is_refused_with_the_names_of_those_that_may_be_meant(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"^--rung {re.escape(name)} is unknown; {meant}$"):
        check_rungs(["zero2", name])
    assert check_rungs(["zero2"]) == ("zero2",)
