"""Scripts that cannot be tuned, and scripts that do what a trial must not let them do: one sentence, nothing left."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import Finished, ladder, make_candidate, make_record, processes_with, wait_until
from helpers.rehearsals import Rehearsals, rehearsals
from helpers.scripts import MISBEHAVING, SCRIPTS, files_in, folder_with_inputs

from ladder.errors import UsageError
from ladder.events.outcome import Outcome
from ladder.search.script_faults import part_of_script
from ladder.units import MIB

pytest.importorskip("datasets")  # the scripts read their data with it

TUNE = ("tune", "--gpus", "0", "--rung")
PLENTY = "3GiB"
Here = Callable[..., Finished]


@pytest.fixture
def home(tmp_path: Path, script_inputs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with models and data. Temporary files go to a folder beside it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return folder_with_inputs(tmp_path / "home", script_inputs)


@pytest.fixture
def tuned(home: Path) -> Here:
    """Tunes a script; it may leave no process, and nothing in the user's folder."""

    def tune(script: str, *options: str, memory: str = PLENTY, rung: str = "zero2") -> Finished:
        before, words = files_in(home), shlex.split(script)
        done = ladder(*TUNE, rung, "--gpu-memory", memory, *options, "--", *words, folder=home)
        assert done.num_left == 0
        assert files_in(home) == before
        assert "Traceback" not in done.errors
        return done

    return tune


@pytest.fixture(scope="module")
def looks(
    tmp_path_factory: pytest.TempPathFactory, trial_environment: dict[str, str], script_inputs: Path
) -> Iterator[Rehearsals]:
    """In a folder of its own with models and data, one after another in one server's life."""
    folder = tmp_path_factory.mktemp("looks")
    home = folder_with_inputs(folder / "home", script_inputs)
    (folder / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "tmp"))
        with rehearsals(home, folder / "trials", trial_environment) as held:
            yield held


def refused(looks: Rehearsals, script: str) -> tuple[str, str]:
    """Why `script` cannot be tuned, and the output of its look, of which nothing else is left."""
    before = files_in(looks.home)
    with pytest.raises(UsageError, match="The script cannot be tuned: ") as found:
        looks.workload(looks.look(*shlex.split(script)))
    assert files_in(looks.home) == before
    why, _, path = str(found.value).removesuffix(").").partition(" (its output is in ")
    left = list(Path(tempfile.gettempdir()).iterdir())
    assert left == ([Path(path)] if path else [])
    output = left[0].read_text(errors="replace") if left else ""
    for log in left:
        log.unlink()
    return why.removeprefix("The script cannot be tuned: "), output


def the_sentence(done: Finished) -> str:
    """What ladder said of the error, which is all that it said after it had begun."""
    (sentence,) = [line for line in done.errors.splitlines() if line.startswith("ladder: ")]
    assert done.errors.endswith(f"{sentence}\n")
    return sentence.removeprefix("ladder: ")


def logs_in(home: Path) -> list[str]:
    """Temporary files of ladder's that were left."""
    return [file.name for file in (home.parent / "tmp").iterdir() if file.name.startswith("ladder")]


@pytest.mark.parametrize(
    ("script", "why", "output"),
    [
        (
            "never_trains.py",
            "the script ended without training in a way that ladder knows: it looked for Trainer.train() of "
            "transformers, Accelerator.prepare() and deepspeed.initialize() in the process that it started",
            "loss",
        ),
        (
            "own_loop.py",
            "it trains in a way that ladder does not know: it looked for Trainer.train() of transformers, "
            "Accelerator.prepare() and deepspeed.initialize()",
            "",
        ),
        (
            "prepares_twice.py",
            "its Accelerator prepares the model and its training data in separate calls; give model, optimizer and "
            "training data to one call of prepare()",
            "",
        ),
        ("zero_steps.py", "it is told to train no step: num_train_epochs is 0", ""),
        ("zero_steps.py --empty", "its training data set is empty", ""),
        (
            "dummy_optimizer.py",
            "its optimizer is a DummyOptim, which stands for that of a DeepSpeed file, and trials replace the file; "
            "make the optimizer in the script",
            "",
        ),
        ("asks.py", "the script asks for input, which a trial cannot give; answer it by an option", "How many steps?"),
        ("exits.py", "the script ended with exit status 3 before it trained", "set LICENCE_OF_THE_DATA"),
        (
            "exits.py --quietly",
            "the script ended without training in a way that ladder knows: it looked for Trainer.train() of "
            "transformers, Accelerator.prepare() and deepspeed.initialize() in the process that it started",
            "set LICENCE_OF_THE_DATA",
        ),
        ("no_package.py", "ModuleNotFoundError: No module named 'a_package_that_nobody_has'", "Traceback"),
        ("no_data.py", "FileNotFoundError: Directory prepared/reviews not found", "Traceback"),
    ],
)
def test_a_script_that_does_not_train_is_refused_with_the_reason_and_its_output(
    script: str, why: str, output: str, looks: Rehearsals
) -> None:
    said, log = refused(looks, f"{MISBEHAVING}/{script}")
    assert said == why
    assert output in log


def test_a_script_whose_model_writes_with_vllm_is_refused_before_vllm_starts(looks: Rehearsals) -> None:
    pytest.importorskip("trl")
    said, _ = refused(looks, f"{SCRIPTS}/grpo_trainer.py --output_dir out --use_cpu --use_vllm")
    assert said.startswith("it generates with vLLM, which trials cannot do yet; tune it with use_vllm=False")


OF_ITS_OWN = "it starts its training in a process of its own; give that command behind --: "


@pytest.mark.parametrize("way", ["run", "exec"])
def test_a_script_that_trains_in_another_process_is_told_what_to_give_in_its_place(way: str, looks: Rehearsals) -> None:
    said, _ = refused(looks, f"{MISBEHAVING}/spawns.py {way} --block_size 32")
    assert said.startswith(f"{OF_ITS_OWN}{sys.executable} {SCRIPTS}/causal_trainer.py --model_name_or_path ")
    assert "--block_size 32" in said


def test_a_script_that_trains_through_a_shell_script_is_told_so(looks: Rehearsals) -> None:
    (looks.home / "tune.sh").write_text(f"cd .\n{sys.executable} {SCRIPTS}/causal_trainer.py --output_dir out\n")
    said, _ = refused(looks, f"{MISBEHAVING}/spawns.py shell")
    assert said.startswith(f"{OF_ITS_OWN}bash tune.sh")


def test_a_script_that_is_refused_ends_the_command_with_a_sentence_and_leaves_no_run(home: Path, tuned: Here) -> None:
    done = tuned(f"{MISBEHAVING}/exits.py")
    assert done.status == 2
    (log,) = logs_in(home)
    where = f"(its output is in {home.parent / 'tmp' / log})"
    assert the_sentence(done) == (
        f"The script cannot be tuned: the script ended with exit status 3 before it trained {where}."
    )
    assert not (home / "ladder-runs").exists()


def test_an_interrupted_look_leaves_nothing(home: Path) -> None:
    (home / "slow.py").write_text("import time, transformers\nopen('cache/begun', 'w').close()\ntime.sleep(600)\n")
    variable, value = "LADDER_TEST_MARKER", f"look-{home}"
    with (home / "stderr.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "ladder.cli.main", *TUNE, "zero2", "--", "slow.py"],
            cwd=home,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(home / "cache"), variable: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        wait_until((home / "cache" / "begun").exists, 120)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    finally:
        process.kill()
        left = processes_with(variable, value)
        for survivor in left:
            survivor.kill()
    assert left == []
    assert logs_in(home) == []
    assert "Traceback" not in (home / "stderr.txt").read_text()
    assert not (home / "ladder-runs").exists()


def test_a_script_that_changes_its_batch_by_itself_is_told_that_trials_decide(looks: Rehearsals) -> None:
    script = f"{MISBEHAVING}/changes_batch.py"
    assert looks.look(script).facts.overrides == ("auto_find_batch_size",)
    done = looks.trial(script, key="zero2 ckpt=off mb=8")
    assert (done.said, done.measured, done.made) == ("", 2, frozenset())


def test_memory_that_runs_out_is_seen_even_where_the_script_would_try_again(home: Path, tuned: Here) -> None:
    # With 40 MiB memory runs out while oneDNN makes its kernels, which can end in a segmentation fault instead.
    done = tuned(f"{MISBEHAVING}/swallows_oom.py", "--micro-batch", "32", "--strategy", "exhaustive", memory="52MiB")
    assert done.status == 3
    assert the_sentence(done).startswith("Nothing fits in 52 MiB per CPU rank")
    assert "its memory limit in " in the_sentence(done)
    logs = list((home / "ladder-runs").rglob("rank*.log"))
    assert logs
    assert [log for log in logs if "trying half of it" in log.read_text(errors="replace")] == []


@pytest.mark.parametrize("rung", ["ddp", "zero2"])
def test_batches_that_a_loop_leaves_out_are_no_part_of_a_proofs_speed(rung: str, looks: Rehearsals) -> None:
    done = looks.trial(f"{MISBEHAVING}/leaves_out.py", key=f"{rung} ckpt=off mb=8", proof=True)
    assert "trained nothing on a batch" in done.said
    assert done.measured == 0


def test_a_script_that_prints_a_gigabyte_is_tried_and_fills_no_disk(looks: Rehearsals) -> None:
    done = looks.trial(f"{MISBEHAVING}/prints.py")
    assert (done.said, done.measured) == ("", 2)
    logs = list(done.folder.glob("rank*.log"))
    assert len(logs) == 2
    assert max(log.stat().st_size for log in logs) <= 17 * MIB


def test_a_script_that_writes_and_uploads_while_it_trains_does_neither_in_a_trial(looks: Rehearsals) -> None:
    (looks.home / "written" / "final").mkdir(parents=True)
    for name in ("log.jsonl", "step-1.json", "final/config.json"):
        (looks.home / "written" / name).write_text("of an earlier training")
    for proof in (False, True):
        done = looks.trial(f"{MISBEHAVING}/writes.py", proof=proof)  # with its tracker, which is not installed, it ends
        assert (done.said, done.measured, done.made) == ("", 2, frozenset())
    for name in ("wandb", "mlruns"):
        assert not (looks.home / name).exists()


@pytest.mark.parametrize(
    ("options", "part", "error"),
    [
        ([], "evaluation", "ValueError: no metric for EvalPrediction"),
        (["--save"], "save", "PermissionError: the archive takes no checkpoint"),
        (["--resume"], "resume from its checkpoint", "KeyError: 'the checkpoint has the names of another release'"),
    ],
    ids=["evaluates", "saves", "resumes"],
)
def test_a_script_that_fails_after_its_training_is_told_when_and_why(
    options: list[str], part: str, error: str, looks: Rehearsals
) -> None:
    done = looks.trial(f"{MISBEHAVING}/fails_later.py", *options, proof=True)
    assert (done.said, done.made) == (error, frozenset())
    outcome = Outcome(kind="crash", moment=done.moment)
    assert part_of_script(make_record(make_candidate(), "crash", outcome=outcome)) == part
