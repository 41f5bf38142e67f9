"""The emitted files of an answer without DeepSpeed, used unchanged by a Trainer script on two CPU ranks."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from helpers import Bench
from helpers.answers import answer
from helpers.engines import engine_trial, measured
from helpers.programs import BESIDE_PYTHON, program
from transformers import HfArgumentParser, TrainingArguments

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate
from ladder.emit import Answer, emit_all
from ladder.emit.files import OutputPaths
from ladder.emit.plain import plain_output
from ladder.emit.trainer import trainer_command_line
from ladder.machine.cores import usable_by_place
from ladder.techniques.bound_cores import BIND_CORES
from ladder.techniques.keys import engine_named
from ladder.trial.script.facts import fsdp_facts
from ladder.workload.script import OwnEngine

SCRIPT = Path(__file__).parents[1] / "scripts" / "plain_trainer.py"
HERE = usable_by_place()
SHARES = BIND_CORES.cores_of_ranks(HERE, 2) if len(HERE) > 1 else []


def plain_answer(engine: str, **changes: object) -> Answer:
    base = answer("zero2")
    workload = replace(base.workload, global_batch_size=8, gradient_clipping=0.5)
    candidate = Candidate(engine_named(engine), checkpoint_every=1, micro_batch=2, accumulation=2)
    return replace(base, workload=workload, candidate=candidate, world_size=2, **changes)  # type: ignore[arg-type]


def trained(on_cpu: Answer, tmp_path: Path) -> list[dict[str, Any]]:
    """What the two ranks of a Trainer script report that the answer's launch script has started."""
    emit_all(on_cpu, tmp_path / "best_config.json")
    launch = OutputPaths.beside(plain_output(tmp_path / "best_config.json")).launch
    assert launch.name == "best_plain.launch.sh"
    own = [str(tmp_path), "--output_dir", str(tmp_path / "out"), "--max_steps", "3", "--report_to", "none"]
    program("bash", str(launch), "--trainer", str(SCRIPT), *own, environment={"PATH": BESIDE_PYTHON})
    return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_a_trainer_script_trains_with_ddp_on_cores_of_its_own_under_the_launch_script(tmp_path: Path) -> None:
    usual = plain_answer("ddp+bind-cores" if SHARES else "ddp", device="cpu", gpu_name=None)
    ranks = trained(usual, tmp_path)
    assert ranks[0]["sum"] == ranks[1]["sum"], "each has its own data, so they agree only if gradients were reduced"
    assert not SHARES or [seen["cores"] for seen in ranks] == SHARES
    for seen in ranks:
        assert (seen["kind"], seen["weights"]) == ("MULTI_CPU", "torch.float32")
        assert seen["autocast"] is True
        assert (seen["sequences"], seen["clipping"], seen["steps"]) == (8, 0.5, 3)
        assert math.isfinite(seen["loss"])
        assert seen["compiled"] == []


@pytest.mark.skipif(not SHARES, reason="two ranks need two cores")
@pytest.mark.parametrize("engine", ["zero1+bind-cores", "ddp+bind-cores"])
def test_each_rank_of_a_trial_runs_on_cores_of_its_own(warm_bench: Bench, tmp_path: Path, engine: str) -> None:
    measured(warm_bench.run(engine_trial(tmp_path / "0001", engine)))
    for rank, share in enumerate(SHARES):
        (said,) = re.findall(r"ladder: bound to cores \[(.*)\]", (tmp_path / f"0001/rank{rank}.log").read_text())
        assert [int(core) for core in said.split(", ")] == share


@pytest.mark.night
@pytest.mark.timeout(400)
def test_the_launch_script_has_the_trainer_compile_what_was_measured(tmp_path: Path) -> None:
    for seen in trained(plain_answer("ddp+compile", device="cpu", gpu_name=None), tmp_path):
        assert {"module.model.layers.0", "module.model.layers.1"} <= set(seen["compiled"]), "each block by itself"
        assert math.isfinite(seen["loss"])


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_the_launch_script_has_the_trainer_compute_in_fp8(tmp_path: Path) -> None:
    for seen in trained(plain_answer("ddp+fp8", device="cpu", gpu_name=None), tmp_path):
        assert {"model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"} <= set(seen["float8"])
        assert "lm_head" not in seen["float8"]
        assert seen["weights"] == "torch.float32"
        assert math.isfinite(seen["loss"])


@pytest.mark.parametrize(
    ("rung", "reshards", "offloads"),
    [("fsdp2", True, False), ("fsdp2+no-reshard", False, False), ("fsdp2+cpu", True, True)],
)
def test_accelerate_and_the_trainer_read_the_settings_of_fsdp2(
    tmp_path: Path, rung: str, reshards: bool, offloads: bool
) -> None:
    emit_all(plain_answer(rung), tmp_path / "mine.json")
    paths = OutputPaths.beside(plain_output(tmp_path / "mine.json"))
    assert paths.accelerate.name == "mine.plain.accelerate.yaml"
    read = load_config_from_file(str(paths.accelerate))  # which refuses keys that accelerate does not know
    assert read.distributed_type == "FSDP"
    assert read.fsdp_config["fsdp_version"] == 2
    assert read.fsdp_config["fsdp_reshard_after_forward"] is reshards
    assert read.fsdp_config["fsdp_offload_params"] is offloads
    launch = paths.launch.read_text()
    assert f"export FSDP_OFFLOAD_PARAMS={str(offloads).lower()}" in launch, "torchrun alone starts no gloo otherwise"
    assert yaml.safe_load(paths.accelerate.read_text())["mixed_precision"] == "bf16"
    words = json.loads(paths.trainer.read_text()) | {"bf16": False, "output_dir": str(tmp_path)}  # no GPU here
    told = TrainingArguments(**words).fsdp_plugin_args
    assert told is not None
    (typed,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(shlex.split(trainer_command_line(words)))
    assert typed.fsdp_plugin_args == told
    assert (told["fsdp_version"], told["reshard_after_forward"], told.get("cpu_offload", False)) == (
        2,
        reshards,
        offloads,
    )
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=reshards, cpu_offload=offloads)
    own = fsdp_facts(torch.nn.Linear(1, 1), told)
    assert own == fsdp_facts(torch.nn.Linear(1, 1), vars(plugin))
    found = RUNGS_BY_NAME[rung]
    assert own == OwnEngine(found.stage, found.offload_optimizer, found.offload_param, fsdp2=True)
