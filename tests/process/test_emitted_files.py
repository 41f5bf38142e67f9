"""The emitted files, used unchanged by the three programs they are for: two ranks, gloo, a tiny Llama on the CPU."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.answers import AWKWARD, answer

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import CHECKPOINTING, HALF, Candidate, Engine, Technique
from ladder.emit import Answer, OutputPaths, emit_all, launch_environment, trainer_arguments, trainer_command_line
from ladder.machine.versions import package_versions
from ladder.techniques.adam_8bit import ADAM_8BIT
from ladder.techniques.bf16_states import BF16_STATES
from ladder.techniques.ulysses import ULYSSES
from ladder.workload.shapes import shape_from_config
from ladder.workload.workload import Workload

for needed in ("torch", "deepspeed", "transformers", "accelerate"):
    pytest.importorskip(needed)

pytestmark = pytest.mark.usefixtures("trial_environment")  # the operator that CPU ranks load

PROGRAMS = Path(__file__).parents[2] / "examples"
WORLD_SIZE = 2
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORLD_SIZE)]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 16,
}
TWO_STEPS = ["--lr_scheduler_type", "constant", "--max_steps", "2"]


def answer_on(rung: str, **changes: Any) -> Answer:
    """An answer for the model of the examples on two CPU ranks. The word auto in it is no value left to others."""
    shape = shape_from_config(TINY, name="tiny-llama", source="file")
    workload = Workload(model=shape, task="causal-lm", seq_len=16, global_batch_size=8, gradient_clipping=0.5)
    settings: dict[str, Any] = {
        "candidate": Candidate(Engine(RUNGS_BY_NAME[rung]), checkpoint_every=1, micro_batch=2, accumulation=2),
        "world_size": WORLD_SIZE,
        "device": "cpu",
        "gpu_name": None,
        # A count that nobody would choose here: neither torchrun's one nor accelerate's cores over ranks.
        "host_threads": 3,
        "allocator": {},
        "versions": {"flash.attention": "auto", **package_versions()},
        "run_dir": Path("auto"),
        "warnings": ("auto",),
    }
    return replace(answer(rung), workload=workload, **settings | changes)


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    folder = tmp_path / "reports"
    folder.mkdir()
    return folder


def run(argv: list[str], reports: Path, environment: dict[str, str] | None = None) -> None:
    """Run a launcher to its end; a hang leaves no rank behind."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "ACCELERATE_"))}
    inherited |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "REPORT_DIR": str(reports),
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.Popen(
        argv,
        env=inherited | (environment or {}),
        cwd=reports,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        ranks = psutil.Process(process.pid).children(recursive=True)  # which have sessions of their own
        process.kill()
        for rank in ranks:
            rank.kill()
        pytest.fail(f"hung: {shlex.join(argv)}\n{process.communicate()[0][-4000:]}")
    assert process.returncode == 0, f"{shlex.join(argv)}\n{output[-8000:]}"


def facts(reports: Path, name: str, answer: Answer) -> list[dict[str, Any]]:
    """Every rank's report, after checking in it what must hold for all three kinds of program."""
    ranks = [json.loads(path.read_text()) for path in sorted(reports.glob(f"{name}-*.json"))]
    assert len(ranks) == WORLD_SIZE
    stage = answer.candidate.engine.rung.stage
    for rank in ranks:
        assert rank["losses"]
        assert all(math.isfinite(loss) for loss in rank["losses"])
        assert rank["changed"] == rank["num_weights"] > 0
        assert rank["stage"] == stage
        assert (rank["partitioned_weights"] > 0) == (stage == 3)
        assert (rank["micro_batch"], rank["accumulation"]) == (2, 2)
        assert rank["clipping"] == 0.5
        assert rank["dtype"] == "torch.bfloat16"
        assert rank["optimizer"] == "AdamW"
        assert rank["omp_threads"] == "3"
    return ranks


def test_deepspeed_initialize_trains_with_the_configuration_and_takes_an_optimizer_that_is_in_it(
    tmp_path: Path, reports: Path
) -> None:
    answers = {"zero2": answer_on("zero2"), "zero3": answer_on("zero3"), "own": answer_on("zero2", learning_rate=2e-3)}
    configs = [str(emit_all(answer, tmp_path / AWKWARD / f"{name}.json")[0]) for name, answer in answers.items()]
    run([*TORCHRUN, str(PROGRAMS / "train_deepspeed.py"), *configs], reports, launch_environment(answers["zero2"]))
    for name, each in answers.items():
        for rank in facts(reports, name, each):
            assert rank["optimizer_steps"] == 2
            assert rank["learning_rate"] == (2e-3 if name == "own" else 3e-3)


def test_a_trainer_script_takes_the_answer_s_optimizer_under_the_launch_script_of_files_that_were_moved(
    tmp_path: Path, reports: Path
) -> None:
    answer = answer_on("zero3", learning_rate=2e-3)
    emit_all(answer, tmp_path / "before" / "best config.json")
    moved = (tmp_path / "before").rename(tmp_path / AWKWARD)
    launch = OutputPaths.beside(moved / "best config.json").launch
    run(["bash", str(launch), "--trainer", str(PROGRAMS / "train_trainer.py"), *TWO_STEPS], reports)
    check_trainer(reports, answer)


def check_trainer(reports: Path, answer: Answer, **facts_of_a_rank: Any) -> None:
    expected = {"learning_rate": 2e-3, "checkpointed_layers": [True, True]} | facts_of_a_rank
    for rank in facts(reports, "trainer", answer):
        assert {name: rank[name] for name in expected} == expected
        # Two steps of the global batch of 8 are all 16 sequences: each rank took its own half.
        assert (rank["optimizer_steps"], rank["epoch"]) == (2, 1.0)


@pytest.mark.parametrize(
    ("numerics", "master"),
    [(BF16_STATES, "torch.bfloat16"), pytest.param(ADAM_8BIT, "torch.float32", marks=pytest.mark.night)],
)
def test_a_trainer_script_reads_the_arguments_file_under_the_launch_script_at_stage_3_with_all_that_lies_beyond(
    numerics: Technique, master: str, tmp_path: Path, reports: Path
) -> None:
    usual = answer_on("zero3").candidate
    beyond = replace(usual, engine=usual.engine.having(numerics), checkpoint_every=HALF)
    answer = answer_on("zero3", candidate=beyond)
    paths = emitted_beside(answer, tmp_path / "best_config.json")
    run(["bash", str(paths.launch), str(PROGRAMS / "train_trainer.py"), str(paths.trainer)], reports)
    moments = numerics == ADAM_8BIT
    check_trainer(reports, answer, checkpointed_layers=[True, False], master_dtype=master, moments_of_8_bits=moments)


def test_a_trainer_script_s_ranks_share_each_sequence_where_the_environment_says_so(
    tmp_path: Path, reports: Path
) -> None:
    usual = answer_on("zero3").candidate
    shared = replace(usual, engine=usual.engine.having(ULYSSES), micro_batch=1, accumulation=8)
    paths = emitted_beside(answer_on("zero3", candidate=shared), tmp_path / "best_config.json")
    run(["bash", str(paths.launch), str(PROGRAMS / "train_trainer.py"), str(paths.trainer)], reports)
    ranks = [json.loads(path.read_text()) for path in sorted(reports.glob("trainer-*.json"))]
    assert len(ranks) == WORLD_SIZE
    assert ranks[0]["losses"][:2] == ranks[1]["losses"][:2]
    for rank in ranks:
        assert all(math.isfinite(loss) for loss in rank["losses"])
        assert rank["changed"] == rank["num_weights"] > 0
        assert (rank["micro_batch"], rank["accumulation"], rank["stage"]) == (1, 8, 3)
        # Two steps of the global batch of 8 are all 16 sequences, each of them taken once, by both.
        assert (rank["optimizer_steps"], rank["epoch"]) == (2, 1.0)


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_transformers_takes_the_arguments_without_a_warning_about_checkpointing(kind: str, tmp_path: Path) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    every, offload = CHECKPOINTING[kind]
    changed = replace(answer_on("zero0").candidate, checkpoint_every=every, offload_activations=offload)
    emitted = trainer_arguments(answer_on("zero0", candidate=changed), tmp_path / "best_config.json")
    del emitted["deepspeed"]  # which would make this process a rank
    (tmp_path / "arguments.json").write_text(json.dumps(emitted))
    parser = HfArgumentParser(TrainingArguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*checkpointing")
        (of_the_file,) = parser.parse_json_file(tmp_path / "arguments.json")
        (typed,) = parser.parse_args_into_dataclasses(shlex.split(trainer_command_line(emitted)))
    partial = ({"every_n_layers": HALF} if every == HALF else {}) | ({"offload": True} if offload else {})
    for arguments in (of_the_file, typed):
        assert arguments.gradient_checkpointing is (every > 0)
        assert arguments.gradient_checkpointing_kwargs == ({"use_reentrant": False, **partial} if every else None)


def emitted_beside(answer: Answer, config: Path) -> OutputPaths:
    emit_all(answer, config)
    return OutputPaths.beside(config)


def test_accelerate_launch_trains_a_plain_script_with_the_yaml_at_stage_2(tmp_path: Path, reports: Path) -> None:
    answer = answer_on("zero2")
    yaml = emitted_beside(answer, tmp_path / "best_config.json").accelerate
    script = str(PROGRAMS / "train_accelerate.py")
    run([*ACCELERATE, "--config_file", str(yaml), script], reports, launch_environment(answer))
    check_accelerate(reports, answer, argv=[])


def test_the_launch_script_trains_an_accelerate_script_with_the_answer_s_optimizer_from_an_awkward_folder(
    tmp_path: Path, reports: Path
) -> None:
    answer = answer_on("zero3", learning_rate=2e-3)
    launch = emitted_beside(answer, tmp_path / AWKWARD / "best config.json").launch
    run(["bash", str(launch), str(PROGRAMS / "train_accelerate.py"), "--data", "a folder's $name"], reports)
    check_accelerate(reports, answer, argv=["--data", "a folder's $name"])


def check_accelerate(reports: Path, answer: Answer, argv: list[str]) -> None:
    ranks = facts(reports, "accelerate", answer)
    for rank in ranks:
        assert rank["argv"] == argv
        assert rank["learning_rate"] == (answer.learning_rate or 3e-3)
        assert rank["world_size"] == WORLD_SIZE
        # 16 sequences: four micro-batches of two a rank, so two optimizer steps.
        assert (len(rank["losses"]), rank["optimizer_steps"]) == (4, 2)
    assert ranks[0]["losses"] != ranks[1]["losses"]  # each its own data
