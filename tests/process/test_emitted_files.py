"""The emitted files, used unchanged by the three programs they are for: two ranks, gloo, a tiny Llama on the CPU."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import CHECKPOINTING, HALF, Candidate, Engine, Technique
from ladder.emit import Answer, OutputPaths, emit_all, launch_environment, trainer_arguments, trainer_command_line
from ladder.events.outcome import Measurement
from ladder.techniques.adam_8bit import ADAM_8BIT
from ladder.techniques.bf16_states import BF16_STATES
from ladder.techniques.ulysses import ULYSSES
from ladder.tuning.versions import package_versions
from ladder.workload.workload import ModelShape, Workload

for needed in ("torch", "deepspeed", "transformers", "accelerate"):
    pytest.importorskip(needed)

pytestmark = pytest.mark.usefixtures("trial_environment")  # the operator that CPU ranks load

PROGRAMS = Path(__file__).parents[2] / "examples"
WORLD_SIZE = 2
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORLD_SIZE)]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
AWKWARD = 'it\'s "quite" a $HOME `dir`; # é'


def answer_on(rung: str) -> Answer:
    shape = ModelShape(
        name="tiny-llama",
        source="file",
        config={"model_type": "llama"},
        model_type="llama",
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64 // 4,
        vocab_size=128,
        max_positions=16,
        num_parameters=98_624,
        num_matmul_parameters=90_112,
        num_block_parameters=41_088,
        largest_parameter=8_192,
        gated_mlp=True,
        is_encoder_decoder=False,
    )
    return Answer(
        workload=Workload(model=shape, task="causal-lm", seq_len=16, global_batch_size=8, gradient_clipping=0.5),
        candidate=Candidate(Engine(RUNGS_BY_NAME[rung]), checkpoint_every=1, micro_batch=2, accumulation=2),
        measurement=Measurement(
            accumulate_seconds=0.1,
            boundary_seconds=0.1,
            spread=0.01,
            num_steps=4,
            peak_allocated=1 << 20,
            peak_reserved=1 << 21,
            peak_device=1 << 22,
            outside_torch=0,
            peak_host=1 << 30,
        ),
        tokens_per_second=640.0,
        step_seconds=0.2,
        mfu=None,
        world_size=WORLD_SIZE,
        device="cpu",
        gpu_name=None,
        memory_limit=1 << 30,
        # A count that nobody would choose here: neither torchrun's one nor accelerate's cores over ranks.
        host_threads=3,
        allocator={},
        nvme_path=None,
        versions={"flash.attention": "auto", **package_versions()},
        run_dir=Path("auto"),
        proof={"steps": 4, "evaluation": True, "gathered_weights": True},
        warnings=("auto",),
    )


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    folder = tmp_path / "reports"
    folder.mkdir()
    return folder


def run(argv: list[str], reports: Path, environment: dict[str, str] | None = None) -> None:
    """Run a launcher to its end in a session of its own, so that a hang leaves no rank behind."""
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
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
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


def test_deepspeed_initialize_trains_with_the_configuration_at_stage_2_and_at_stage_3(
    tmp_path: Path, reports: Path
) -> None:
    answers = {rung: answer_on(rung) for rung in ("zero2", "zero3")}
    configs = [str(emit_all(answer, tmp_path / AWKWARD / f"{rung}.json")[0]) for rung, answer in answers.items()]
    run([*TORCHRUN, str(PROGRAMS / "train_deepspeed.py"), *configs], reports, launch_environment(answers["zero2"]))
    for rung, answer in answers.items():
        for rank in facts(reports, rung, answer):
            assert rank["optimizer_steps"] == 2
            assert rank["learning_rate"] == 3e-3


def test_a_script_without_an_optimizer_of_its_own_takes_the_one_in_the_answer(tmp_path: Path, reports: Path) -> None:
    answer = dataclasses.replace(answer_on("zero2"), learning_rate=2e-3)
    config = str(emit_all(answer, tmp_path / AWKWARD / "zero2.json")[0])
    run([*TORCHRUN, str(PROGRAMS / "train_deepspeed.py"), config], reports, launch_environment(answer))
    for rank in facts(reports, "zero2", answer):
        assert rank["learning_rate"] == 2e-3


def test_the_trainer_takes_the_optimizer_in_the_answer_with_its_learning_rate(tmp_path: Path, reports: Path) -> None:
    answer = dataclasses.replace(answer_on("zero2"), learning_rate=2e-3)
    config = emit_all(answer, tmp_path / AWKWARD / "best_config.json")[0]
    own = ["--lr_scheduler_type", "constant", "--max_steps", "2"]
    emitted = shlex.split(trainer_command_line(trainer_arguments(answer, config)))
    run([*TORCHRUN, str(PROGRAMS / "train_trainer.py"), *own, *emitted], reports, launch_environment(answer))
    for rank in facts(reports, "trainer", answer):
        assert rank["learning_rate"] == 2e-3


def test_a_trainer_script_takes_the_arguments_on_its_command_line_and_keeps_its_own_learning_rate(
    tmp_path: Path, reports: Path
) -> None:
    answer = answer_on("zero2")
    config = emit_all(answer, tmp_path / AWKWARD / "best_config.json")[0]
    own = ["--learning_rate", "2e-3", "--lr_scheduler_type", "constant", "--max_steps", "2"]
    emitted = shlex.split(trainer_command_line(trainer_arguments(answer, config)))
    run([*TORCHRUN, str(PROGRAMS / "train_trainer.py"), *own, *emitted], reports, launch_environment(answer))
    for rank in facts(reports, "trainer", answer):
        assert rank["learning_rate"] == 2e-3
        assert rank["checkpointed_layers"] == [True, True]
        # Two steps of the global batch of 8 are all 16 sequences: each rank took its own half.
        assert (rank["optimizer_steps"], rank["epoch"]) == (2, 1.0)


def test_a_trainer_script_trains_under_the_launch_script_of_files_that_were_moved(
    tmp_path: Path, reports: Path
) -> None:
    answer = answer_on("zero3")
    emit_all(answer, tmp_path / "before" / "best config.json")
    moved = (tmp_path / "before").rename(tmp_path / AWKWARD)
    own = ["--learning_rate", "2e-3", "--lr_scheduler_type", "constant", "--max_steps", "2"]
    launch = OutputPaths.beside(moved / "best config.json").launch
    run(["bash", str(launch), "--trainer", str(PROGRAMS / "train_trainer.py"), *own], reports)
    for rank in facts(reports, "trainer", answer):
        assert rank["learning_rate"] == 2e-3
        assert (rank["optimizer_steps"], rank["epoch"]) == (2, 1.0)


@pytest.mark.parametrize(("numerics", "master"), [(BF16_STATES, "torch.bfloat16"), (ADAM_8BIT, "torch.float32")])
def test_a_trainer_script_reads_the_arguments_file_under_the_launch_script_at_stage_3_with_all_that_lies_beyond(
    numerics: Technique, master: str, tmp_path: Path, reports: Path
) -> None:
    usual = answer_on("zero3").candidate
    beyond = replace(usual, engine=usual.engine.having(numerics), checkpoint_every=HALF)
    answer = replace(answer_on("zero3"), candidate=beyond)
    emit_all(answer, tmp_path / "best_config.json")
    paths = OutputPaths.beside(tmp_path / "best_config.json")
    run(["bash", str(paths.launch), str(PROGRAMS / "train_trainer.py"), str(paths.trainer)], reports)
    for rank in facts(reports, "trainer", answer):
        assert rank["learning_rate"] == 2e-3
        assert rank["checkpointed_layers"] == [True, False]
        assert rank["master_dtype"] == master
        assert rank["moments_of_8_bits"] is (numerics == ADAM_8BIT)
        assert (rank["optimizer_steps"], rank["epoch"]) == (2, 1.0)


def test_a_trainer_script_s_ranks_share_each_sequence_where_the_environment_says_so(
    tmp_path: Path, reports: Path
) -> None:
    usual = answer_on("zero3").candidate
    shared = replace(usual, engine=usual.engine.having(ULYSSES), micro_batch=1, accumulation=8)
    answer = replace(answer_on("zero3"), candidate=shared)
    emit_all(answer, tmp_path / "best_config.json")
    paths = OutputPaths.beside(tmp_path / "best_config.json")
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
    answer = replace(answer_on("zero0"), candidate=changed)
    emitted = trainer_arguments(answer, tmp_path / "best_config.json")
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


def test_accelerate_launch_trains_a_plain_script_with_the_yaml_at_stage_2(tmp_path: Path, reports: Path) -> None:
    answer = answer_on("zero2")
    emit_all(answer, tmp_path / "best_config.json")
    yaml = OutputPaths.beside(tmp_path / "best_config.json").accelerate
    script = str(PROGRAMS / "train_accelerate.py")
    run([*ACCELERATE, "--config_file", str(yaml), script], reports, launch_environment(answer))
    check_accelerate(reports, answer, argv=[])


def test_the_launch_script_trains_a_plain_accelerate_script_at_stage_3_from_an_awkward_folder(
    tmp_path: Path, reports: Path
) -> None:
    answer = answer_on("zero3")
    emit_all(answer, tmp_path / AWKWARD / "best config.json")
    launch = OutputPaths.beside(tmp_path / AWKWARD / "best config.json").launch
    run(["bash", str(launch), str(PROGRAMS / "train_accelerate.py"), "--data", "a folder's $name"], reports)
    check_accelerate(reports, answer, argv=["--data", "a folder's $name"])


@pytest.mark.parametrize("rung", ["zero2", "zero3"])
def test_an_accelerate_script_with_a_dummy_optimizer_takes_the_one_in_the_answer(
    rung: str, tmp_path: Path, reports: Path
) -> None:
    answer = dataclasses.replace(answer_on(rung), learning_rate=2e-3)
    emit_all(answer, tmp_path / "best_config.json")
    launch = OutputPaths.beside(tmp_path / "best_config.json").launch
    run(["bash", str(launch), str(PROGRAMS / "train_accelerate.py")], reports)
    check_accelerate(reports, answer, argv=[], learning_rate=2e-3)


def check_accelerate(reports: Path, answer: Answer, argv: list[str], learning_rate: float = 3e-3) -> None:
    ranks = facts(reports, "accelerate", answer)
    for rank in ranks:
        assert rank["argv"] == argv
        assert rank["learning_rate"] == learning_rate
        assert rank["world_size"] == WORLD_SIZE
        # 16 sequences: four micro-batches of two a rank, so two optimizer steps.
        assert (len(rank["losses"]), rank["optimizer_steps"]) == (4, 2)
    assert ranks[0]["losses"] != ranks[1]["losses"]  # each its own data
