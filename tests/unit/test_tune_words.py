"""The options of a tune as words, a job of them, and copies of ladder that srun started by mistake."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from ladder.cli import tune_words
from ladder.cli.extra_copies import said_to_extra_copy
from ladder.cli.main import main
from ladder.options.tune import TuneOptions
from ladder.workload.lora import lora_from_text

STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "tiny-llama"}, ["tiny-llama"]),
        ({"gpu_memory": 40 << 30, "time_budget": 900.0}, ["--gpu-memory=40GiB", "--time-budget=15m"]),
        ({"gpu_memory": (1 << 30) + 1, "time_budget": 7.5}, ["--gpu-memory=1073741825B", "--time-budget=7.5s"]),
        ({"micro_batches": (1, 2), "wait": True}, ["--wait", "--micro-batch=1", "--micro-batch=2"]),
        ({"switches": {"liger": False}}, ["--no-liger"]),
        ({"script": ("train.py", "--lr", "1"), "gpus": 2}, ["--gpus=2", "--", "train.py", "--lr", "1"]),
    ],
)
def test_options_become_the_words_of_the_command_line(given: dict[str, Any], words: list[str]) -> None:
    assert sorted(tune_words.words_of(TuneOptions(**given))) == sorted(words)


def test_adapters_become_words_that_say_the_same() -> None:
    text = "r=4,dropout=0.1,dora,targets=q_proj,v_proj,modules_to_save=embed_tokens,lm_head,exclude_modules=up_proj"
    (words,) = tune_words.words_of(TuneOptions(lora=lora_from_text(text)))
    assert lora_from_text(words.removeprefix("--lora=")) == lora_from_text(text)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job in a folder with an awkward name."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder / "tune.sbatch"


def test_the_job_is_a_shell_script_with_a_fixed_history(job: Path) -> None:
    assert main(["sbatch", "tiny-llama", "--gpus", "8", "--host-memory", "400GiB", "--job-file", job.name]) == 0
    text = job.read_text()
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "#SBATCH --mem=408G\n" in text
    assert "##SBATCH --account=YOUR-ACCOUNT\n" in text
    (line,) = (line for line in text.splitlines() if line.startswith("ladder tune"))
    (run_dir,) = (word for word in shlex.split(line) if word.startswith("--run-dir="))
    assert run_dir.startswith(f"--run-dir={job.parent}/ladder-runs/tiny-llama-job-")


def test_the_job_takes_the_defaults_of_tune(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job.parent / "ladder.yaml").write_text("tune: {gpus: 4}\nsbatch: {account: team}\n")
    assert main(["sbatch", "tiny-llama"]) == 0
    text = capsys.readouterr().out
    assert "--gpus=4" in text
    assert "#SBATCH --account=team\n" in text


def test_what_tune_would_refuse_is_refused_before_a_job_is_written(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--documented", "--backend", "torch"]
    assert main(["sbatch", "tiny-llama", *wrong, "--job-file", job.name]) == 2
    assert main(["sbatch", "tiny-llama", "--machine", "a100-80", "--job-file", job.name]) == 2
    assert main(["sbatch", "tiny-llama", "--account", "two words", "--job-file", job.name]) == 2
    assert main(["sbatch", "tiny-llama", "--time", "2h", "--job-file", job.name]) == 2
    said = capsys.readouterr().err
    assert "--documented leaves out" in said
    assert not job.exists()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ acount }}", "'acount' is undefined; the names that ladder fills in are job_name, account"),
        ("\n{% if %}", "line 2: "),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_template_that_is_wrong_is_said_in_one_sentence(
    template: str | None, said: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if template is not None:
        Path("my.jinja").write_text(template)
    assert main(["sbatch", "tiny-llama", "--template", "my.jinja"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_printed_template_gives_the_same_job(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sbatch", "--print-template"]) == 0
    Path("my.jinja").write_text(capsys.readouterr().out)
    assert main(["sbatch", "tiny-llama"]) == 0
    built_in = capsys.readouterr().out
    assert main(["sbatch", "tiny-llama", "--template", "my.jinja"]) == 0
    assert capsys.readouterr().out == built_in


@pytest.mark.parametrize(
    ("changes", "is_extra"),
    [
        ({"SLURM_PROCID": "0"}, False),
        ({"SLURM_PROCID": "3"}, True),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_PROCID": "3", "SLURM_STEP_ID": "4294967290"}, False),  # an interactive shell
        ({"SLURM_PROCID": "3", "SLURM_STEP_ID": "batch"}, False),
        ({"SLURM_PROCID": "3", "SLURM_STEP_ID": ""}, False),
        ({}, False),
    ],
)
def test_only_later_tasks_of_a_step_are_extra_copies(changes: dict[str, str], is_extra: bool) -> None:
    assert (said_to_extra_copy({**STEP, **changes}) is not None) is is_extra


@pytest.mark.parametrize(("number", "is_extra"), [("0", False), ("1", True)])
def test_of_an_answer_for_several_nodes_the_first_copy_on_each_works(number: str, is_extra: bool) -> None:
    step = {**STEP, "SLURM_PROCID": "3", "SLURM_LOCALID": number}
    assert (said_to_extra_copy(step, of_each_node=True) is not None) is is_extra


def test_further_options_of_sbatch_are_lines_of_the_job(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--job-option", "constraint=a100", "--job-option", "exclusive", "--account", "me"]
    assert main(["sbatch", "tiny-llama", *words]) == 0
    written = capsys.readouterr().out
    assert "#SBATCH --constraint=a100\n#SBATCH --exclusive\n" in written
    assert "#SBATCH --account=me\n" in written
    (tune,) = [line for line in written.splitlines() if line.startswith("ladder tune")]
    assert "--account" not in tune
    assert "--job-option" not in tune


def test_an_extra_copy_ends_at_once_and_a_plan_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**STEP, "SLURM_PROCID": "3"}.items():
        monkeypatch.setenv(name, value)
    assert main(["tune", "no-such-model"]) == 0
    assert "ladder: this is copy 4 of 8" in capsys.readouterr().err
    assert main(["plan", "tiny-llama", "--machine", "a100-40"]) == 0
