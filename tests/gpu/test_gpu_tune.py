"""Real trials on a real GPU, through the command line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pynvml
import pytest
from helpers import FOUR_LAYERS_CONFIG

from ladder.cli.main import main
from ladder.emit import load_best_config
from ladder.machine.gpus import visible_gpus
from ladder.options.technique_choices import ways_of_checkpointing
from ladder.units import MIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not visible_gpus(), reason="needs a CUDA GPU")]


VOCABULARY = 128_000
needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
needs_liger = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")


def used_bytes() -> int:
    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(visible_gpus()[0].uuid)).used)


SIXTEEN = ["--global-batch-size", "16", "--seq-len", "1024"]


def tune(folder: Path, *arguments: str, run: str = "run", **changes: Any) -> pd.DataFrame:
    """What trials.csv says of a tune on one GPU; `changes` are to the configuration of the four layers."""
    (folder / "config.json").write_text(json.dumps({**FOUR_LAYERS_CONFIG, **changes}))
    files = ["--run-dir", str(folder / run), "--output", str(folder / "best_config.json")]
    assert main(["tune", str(folder), "--gpus", "1", *arguments, *files]) == 0
    return pd.read_csv(folder / run / "trials.csv")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu tune")
    (folder / "used before").write_text(str(used_bytes()))
    tune(folder, *SIXTEEN, "--gpu-memory", "8GiB", *("--rung", "zero2", "--rung", "zero2+opt-cpu", "--rung", "zero3"))
    return folder


def test_an_oom_is_typed_with_rank_moment_and_bytes(tuned: Path) -> None:
    table = pd.read_csv(tuned / "run" / "trials.csv")
    failed = table[table["outcome"] == "gpu_oom"]
    assert len(failed) > 0
    assert failed["why"].str.contains(r"rank 0 ran out of GPU memory in \w+: asked for .+ with .+ free").any()


def test_nothing_that_fits_held_more_than_the_limit(tuned: Path) -> None:
    table = pd.read_csv(tuned / "run" / "trials.csv")
    fits = table[table["outcome"] == "fits"]
    assert len(fits) >= 3
    assert (fits["peak_device_gib"] <= 8.01).all()
    assert (fits["peak_device_gib"] > fits["peak_reserved_gib"]).all(), "context and NCCL lie outside torch"


def test_energy_and_utilisation_are_recorded_but_not_where_the_optimizer_s_share_misleads(tuned: Path) -> None:
    fits = pd.read_csv(tuned / "run" / "trials.csv").query("outcome == 'fits'")
    assert fits["utilisation"].between(0, 1, inclusive="right").all()
    told = fits[fits["watts"].notna()]
    assert (told["watts"] > 50).all()
    assert (told["joules_per_token"] > 0).all()
    # With one or two micro-steps in a step, a trial's steps are those of a training.
    whole = fits[fits["micro_batch"] >= 8]
    assert len(whole) > 0
    assert whole["watts"].notna().all()


def test_the_answer_states_its_utilisation_of_the_known_gpu(tuned: Path) -> None:
    section = load_best_config(tuned / "best_config.json")["ladder"]
    assert 0 < section["mfu"] < 1
    assert section["proof"]["gathered_16bit_weights"]


def test_no_gpu_memory_is_left_behind(tuned: Path) -> None:
    before = int((tuned / "used before").read_text())
    assert used_bytes() <= before + 64 * MIB


def tuned_with_logits(folder: Path, rung: str, *arguments: str) -> pd.DataFrame:
    """The checkpointed candidates, by rung and micro-batch, of a tune whose logits are most of what it holds."""
    workload = ["--global-batch-size", "32", "--seq-len", "1024", "--rung", rung, "--strategy", "exhaustive"]
    table = tune(folder, *workload, *arguments, vocab_size=VOCABULARY).query("checkpointing == 'on'")
    return table.set_index(["rung", "micro_batch"])


@needs_liger
@pytest.mark.parametrize("rung", ["zero2", "zero3"])
def test_on_liger_s_kernels_what_did_not_fit_does_and_losses_are_the_same(tmp_path: Path, rung: str) -> None:
    table = tuned_with_logits(tmp_path, rung, "--micro-batch", "8", "--gpu-memory", "22GiB")
    assert table.loc[(rung, 8), "outcome"] == "gpu_oom"
    assert table.loc[(f"{rung}+liger", 8), "outcome"] == "fits"
    section = load_best_config(tmp_path / "best_config.json")["ladder"]
    assert section["liger"], "the only one that fits, whose losses were compared with those of zero1 before its proof"
    assert section["environment"]["PYTORCH_CUDA_ALLOC_CONF"].startswith("expandable_segments:True")
    assert not any("losses" in warning for warning in section["warnings"])


@pytest.mark.parametrize(
    ("rung", "allowed"), [("zero1+opt-cpu", []), ("zero2", ["--allow", "bf16-states"]), ("zero3", [])]
)
def test_what_lies_beyond_the_ladder_is_proven_and_half_checkpointing_takes_memory_in_between(
    tmp_path: Path, rung: str, allowed: list[str]
) -> None:
    options = ["--no-liger", "--rung", rung, "--micro-batch", "4", "--strategy", "exhaustive", *allowed]
    table = tune(tmp_path, *SIXTEEN, *options)
    section = load_best_config(tmp_path / "best_config.json")["ladder"]
    assert section["proof"]["gathered_16bit_weights"]
    assert not any("losses" in warning for warning in section["warnings"])
    assert not table["why"].str.contains("losses differ from those").any()
    for _, engine in table.groupby("rung"):
        allocated = engine.set_index("checkpointing")["peak_allocated_gib"]
        kinds = ["on", "1/2", "off"] if "1/2" in ways_of_checkpointing(version("transformers")) else ["on", "off"]
        assert list(allocated.sort_values().index) == kinds


@needs_liger
@pytest.mark.skipif("cpu" not in ways_of_checkpointing(version("transformers")), reason="needs a transformers that can")
def test_a_sequence_too_long_for_the_gpu_is_trained_with_its_activations_on_the_host(tmp_path: Path) -> None:
    options = ["--global-batch-size", "2", "--seq-len", "65536", "--liger", "--rung", "zero2+opt-cpu"]
    tune(tmp_path, *options, "--gpu-memory", "10GiB", num_hidden_layers=12, max_position_embeddings=65536)
    section = load_best_config(tmp_path / "best_config.json")["ladder"]
    assert section["offload_activations"], "the only one that fits, whose losses were compared with those of zero1"
    assert not any("losses" in warning for warning in section["warnings"])


@needs_torchao
def test_fp8_on_one_gpu_trains_like_16_bits_and_is_faster_with_compiled_blocks(tmp_path: Path) -> None:
    options = ["--backend", "torch", "--rung", "ddp", "--micro-batch", "8", "--strategy", "exhaustive", "--no-liger"]
    table = tune(tmp_path, *SIXTEEN, *options, "--allow", "fp8", "--allow", "compile")
    fits = set(table[table["outcome"] == "fits"]["rung"])
    assert {"ddp", "ddp+fp8", "ddp+compile", "ddp+compile+fp8"} <= fits
    speeds = table.query("checkpointing == 'off'").set_index("rung")["tokens_per_second"]
    print(speeds)
    assert speeds["ddp+compile+fp8"] > speeds["ddp+fp8"], "scaling and casting are worth compiling"
    assert not table["why"].str.contains("losses differ from those", na=False).any()


@pytest.mark.parametrize(
    "adapters",
    [
        pytest.param([], id="all weights"),
        pytest.param(["--lora", "r=8"], id="LoRA"),
        pytest.param(["--lora", "r=8", "--load-in", "4bit"], id="QLoRA", marks=needs_bitsandbytes),
    ],
)
def test_fsdp2_on_one_gpu_is_tried_and_proven(tmp_path: Path, adapters: list[str]) -> None:
    rungs = ["--backend", "torch", "--rung", "fsdp2", "--rung", "fsdp2+no-reshard", "--micro-batch", "4"]
    table = tune(tmp_path, *SIXTEEN, *adapters, *rungs, "--no-liger", "--strategy", "exhaustive")
    fits = table[table["outcome"] == "fits"]
    assert {"fsdp2", "fsdp2+no-reshard"} <= set(fits["rung"])
    print(fits[["rung", "checkpointing", "tokens_per_second"]])
    assert not table["why"].str.contains("losses differ from those", na=False).any()


def test_engines_in_processes_that_stayed_are_measured_as_in_new_ones(tmp_path: Path) -> None:
    options = ["--backend", "deepspeed", "--no-liger", "--strategy", "exhaustive", "--micro-batch", "4"]
    options += ["--rung", "zero0", "--rung", "zero1", "--rung", "zero2"]
    tables = {}
    for name, extra in {"stayed": [], "new": ["--cold"]}.items():
        table = tune(tmp_path, *SIXTEEN, *options, *extra, run=name)
        tables[name] = table[table["outcome"] == "fits"].set_index(["rung", "checkpointing"])
    stayed, new = tables["stayed"], tables["new"]
    logs = [file.read_text() for file in (tmp_path / "stayed" / "trials").glob("*/rank0.log")]
    assert sum("this process ran trial" in log for log in logs) >= 2
    assert sorted(stayed.index) == sorted(new.index)
    for key in new.index:
        assert stayed["peak_allocated_gib"][key] == pytest.approx(new["peak_allocated_gib"][key], rel=0.01)
    assert not list((tmp_path / "stayed" / "trials").glob("*/rank0-before.jsonl"))


def test_a_run_under_a_limit_may_have_what_its_tune_left_to_torch_and_no_more() -> None:
    """In a process of its own, which the limit outlives."""
    code = """
from types import SimpleNamespace
import torch
from deepspeed.accelerator import get_accelerator
from ladder.events.protocol import ScriptSpec
from ladder.trial.script.start import limit_run
script = ScriptSpec(command=("train.py",), mode="run", torch_limit=2 << 30)
limit_run(SimpleNamespace(device="cuda", memory_limit=3 << 30), script)
taken = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
print(get_accelerator().available_memory() == 1 << 30)
try:
    torch.empty(3 << 29, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("out of memory")
"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "LOCAL_RANK": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == ["True", "out of memory"]


def test_what_was_taken_is_taken_again_only_where_a_narrower_limit_has_no_room_for_it() -> None:
    """In a process of its own, which the limit outlives."""
    code = """
import sys, torch
from ladder.trial.gauge import CudaGauge
gauge = CudaGauge(sys.argv[1])
torch.zeros(1, device="cuda")
gauge.start(6 << 30)
gauge.reset()
taken = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
print(gauge.settle())
gauge.start(4 << 30)
print(gauge.settle())
gauge.start(2 << 30)
print(gauge.settle())
"""
    command = [sys.executable, "-c", code, visible_gpus()[0].uuid]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == [
        "False",
        "False",
        "True",
    ]
