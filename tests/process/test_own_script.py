"""Unmodified training scripts: each is tuned on two CPU ranks, trains with the answer, and the answer can be verified.

The micro-batch of every answer is given, and another than the script's own, so that what the script says of its
training afterwards shows whose it was.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import Finished, ladder
from helpers.scripts import MISBEHAVING, SCRIPTS, digest_of, files_in, folder_with_inputs

from ladder import api
from ladder.units import GIB

pytest.importorskip("datasets")  # the scripts read their data with it


@dataclass(frozen=True)
class Case:
    """A script, and what is known of it beforehand. `{scripts}` in commands is the folder of the scripts."""

    command: str
    kind: str
    micro_batch: int
    accumulation: int
    """Of two ranks with that micro-batch, for the global batch of the script's own settings."""
    mean_tokens: float
    padding: bool
    """Whether the script's batches have any."""
    check: Callable[[Case, Path, Finished], None]
    """Of a run: that it trained with the micro-batch and the accumulation."""
    run: str = ""
    """A shorter command for the run; without it, the one that was tuned."""
    rung: str = "zero2"
    mapped: tuple[str, ...] = ()
    """What the tune is told of the script's options."""
    module: str = ""
    """The script, where it is an installed module."""

    def words(self, command: str) -> list[str]:
        return command.format(scripts=SCRIPTS).split()

    @property
    def script(self) -> Path:
        if self.module:
            return Path(pytest.importorskip(self.module).__file__)
        return next(Path(word) for word in self.words(self.command) if word.endswith(".py"))


STEPS = 20
"""Optimizer steps, at least, that a script trains for with its answer."""


def trainer_state(folder: Path, steps: int = STEPS) -> Any:
    """What a Trainer saved of its state with its last checkpoint, after all `steps`."""
    (file,) = folder.glob("checkpoint-*/trainer_state.json")
    state = json.loads(file.read_text())
    assert state["global_step"] == steps
    return state


def epochs_of(case: Case, samples: int, steps: int = STEPS) -> float:
    """Those that so many optimizer steps make of `samples` on two ranks. The last of an epoch may be a short one."""
    micro_steps = samples / 2 / case.micro_batch
    whole, rest = divmod(steps, math.ceil(micro_steps / case.accumulation))
    return whole + rest * case.accumulation / micro_steps


def check_causal_trainer(case: Case, folder: Path, done: Finished) -> None:
    state = trainer_state(folder / "out")
    assert state["train_batch_size"] == case.micro_batch
    assert state["epoch"] == pytest.approx(epochs_of(case, 184))


def check_experts(case: Case, folder: Path, done: Finished) -> None:
    check_causal_trainer(case, folder, done)
    leaves = "fetched as a whole: Qwen3MoeSparseMoeBlock, Qwen3MoeSparseMoeBlock\n"
    assert done.output.count(leaves) == 2, "both ranks fetch both layers' experts at once, as nobody told them to"


def check_sft(case: Case, folder: Path, done: Finished) -> None:
    state = trainer_state(folder / "sft-out")
    assert state["train_batch_size"] == case.micro_batch
    assert state["epoch"] == pytest.approx(epochs_of(case, 400))


def check_pictures(case: Case, folder: Path, done: Finished) -> None:
    state = trainer_state(folder / "pictures-out")
    assert state["train_batch_size"] == case.micro_batch
    assert state["epoch"] == pytest.approx(epochs_of(case, 200))
    assert len([each for each in state["log_history"] if "eval_loss" in each]) == 2


def check_grpo(case: Case, folder: Path, done: Finished) -> None:
    state = trainer_state(folder / "grpo-out")
    assert state["train_batch_size"] == case.micro_batch
    completions = state["global_step"] * case.accumulation * case.micro_batch * 2
    assert state["epoch"] == pytest.approx(completions / 4 / 400)  # four for each prompt
    written = done.output.count("wrote completions of")
    assert written == 2 * state["global_step"], "both ranks write once for each optimizer step"


def check_causal_loop(case: Case, folder: Path, done: Finished) -> None:
    steps = 2 * math.ceil(190 / (2 * case.micro_batch * case.accumulation))  # of two epochs, as the script counts them
    shown = [int(step) for step, of in re.findall(r"(\d+)/(\d+) \[", done.errors) if int(of) == steps]
    assert max(shown) == steps >= STEPS


def check_counted_loop(case: Case, folder: Path, done: Finished) -> None:
    said = f"{STEPS} optimizer steps, {STEPS * case.accumulation} micro-steps of {case.micro_batch}"
    assert done.output.count(said) == 2, "both ranks step once for so many micro-steps, whatever the script counts"


_TRAINER = "{scripts}/causal_trainer.py --model_name_or_path model --train_file text/train.jsonl --output_dir out"
_EXPERTS = "{scripts}/shows_leaves.py " + _TRAINER.replace("path model", "path experts")
_LOOP = "accelerate launch --num_processes 2 {scripts}/causal_loop.py --model_name_or_path model "
_LOOP += "--train_file text/train.jsonl --num_train_epochs "
_SFT = "-m trl.scripts.sft --model_name_or_path model --dataset_name ./text --output_dir sft-out --use_cpu "
_SFT += "--per_device_train_batch_size 4 --max_steps"
_COUNTED = "{scripts}/counted_loop.py --batch-size 2 --accumulate 8"
_PICTURES = (
    "-m trl.scripts.sft --model_name_or_path vision --dataset_name ./pictures --output_dir pictures-out --use_cpu "
)
_PICTURES += (
    "--per_device_train_batch_size 4 --dataset_test_split train --eval_strategy steps --eval_steps 10 --max_steps"
)
_GRPO = "{scripts}/grpo_trainer.py --output_dir grpo-out --use_cpu --num_generations 4 --max_completion_length 32 "
_GRPO += "--per_device_train_batch_size 4 --max_steps"

CASES = {
    "causal_trainer at zero3": Case(
        f"torchrun --nproc_per_node 2 {_TRAINER} --max_steps 3",
        "trainer",
        2,
        4,
        64.0,
        False,
        check_causal_trainer,
        run=f"{_TRAINER} --max_steps {STEPS}",
        rung="zero3",
    ),
    "experts at zero3": Case(
        f"{_EXPERTS} --max_steps 3",
        "trainer",
        2,
        4,
        64.0,
        False,
        check_experts,
        run=f"{_EXPERTS} --max_steps {STEPS}",
        rung="zero3",
    ),
    "causal_loop": Case(f"{_LOOP} 40", "accelerate", 4, 2, 64.0, False, check_causal_loop, run=f"{_LOOP} 2"),
    "counted_loop": Case(
        _COUNTED,
        "deepspeed",
        4,
        4,
        27.7,
        True,
        check_counted_loop,
        run=f"{_COUNTED} --micro-steps {4 * STEPS}",
        mapped=("micro_batch=--batch-size", "accumulation=--accumulate"),
    ),
    "grpo_trainer": Case(f"{_GRPO} 3", "trainer", 2, 2, 54.2, True, check_grpo, run=f"{_GRPO} {STEPS}"),
    "trl.scripts.sft": Case(
        f"{_SFT} 2", "trainer", 2, 2, 33.9, True, check_sft, run=f"{_SFT} {STEPS}", module="trl.scripts.sft"
    ),
    "trl.scripts.sft on pictures": Case(
        f"{_PICTURES} 2",
        "trainer",
        2,
        2,
        80.4,
        True,
        check_pictures,
        run=f"{_PICTURES} {STEPS}",
        module="trl.scripts.sft",
    ),
}


def tune_options(rung: str, micro_batch: int, mapped: tuple[str, ...] = ()) -> list[str]:
    options = ["tune", "--gpus", "0", "--gpu-memory", "3GiB", "--rung", rung, "--micro-batch", str(micro_batch)]
    options += [word for each in mapped for word in ("--map", each)]
    return [*options, "--run-dir", "ladder-runs/own", "--"]


@dataclass(frozen=True)
class Tuned:
    case: Case
    folder: Path
    done: Finished
    before: dict[str, str]
    digest: str

    @property
    def config(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / "best_config.json").read_text())
        return document


# tests/process/test_pictures.py shows in a second what is done about images.
AT_NIGHT = ("experts at zero3", "trl.scripts.sft on pictures", "counted_loop", "grpo_trainer")
"""test_same_training.py has such loops."""
TRAINS_AT_NIGHT = (*AT_NIGHT, "causal_trainer at zero3", "causal_loop")
"""The launch script's test trains the first; test_same_training.py counts what such loops train on."""
PARAMETERS = {name: pytest.param(name, marks=[pytest.mark.night] * (name in AT_NIGHT)) for name in CASES}


def of_cases(*names: str) -> pytest.MarkDecorator:
    """For a test that tells as much with a few of them."""
    return pytest.mark.parametrize("tuned", [PARAMETERS[name] for name in names], indirect=True)


@pytest.fixture(scope="module", params=PARAMETERS.values())
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, script_inputs: Path) -> Tuned:
    case = CASES[request.param]
    if case.module or "grpo" in case.command:
        pytest.importorskip("trl")
    if "pictures" in case.command:
        pytest.importorskip("PIL")
    folder = folder_with_inputs(tmp_path_factory.mktemp("own script"), script_inputs)
    before, digest = files_in(folder), digest_of(case.script)
    done = ladder(*tune_options(case.rung, case.micro_batch, case.mapped), *case.words(case.command), folder=folder)
    return Tuned(case, folder, done, before, digest)


def test_a_script_is_tuned_as_it_is_and_nothing_of_the_user_s_is_touched(tuned: Tuned) -> None:
    assert tuned.done.status == 0, tuned.done.errors
    assert tuned.done.num_left == 0
    assert "Traceback" not in tuned.done.errors
    assert digest_of(tuned.case.script) == tuned.digest
    assert files_in(tuned.folder) == tuned.before
    assert not list((tuned.folder / "ladder-runs").rglob("scratch"))


def test_every_rank_reports_that_it_took_hold_of_the_training(tuned: Tuned) -> None:
    by = re.compile(rf'"kind":"held",.*"by":"{tuned.case.kind}"')
    logs = [file.read_text() for file in tuned.folder.glob("ladder-runs/own/trials/*/rank*.jsonl")]
    ends = [log for log in logs if '"kind":"measured"' in log and by.search(log)]
    assert len(ends) >= 4  # two ranks in the trial of the winner, and two in its proof


def test_the_answer_names_the_script_and_promises_samples(tuned: Tuned) -> None:
    case, section = tuned.case, tuned.config["ladder"]
    assert (section["rung"], section["micro_batch"], section["accumulation"]) == (
        case.rung,
        case.micro_batch,
        case.accumulation,
    )
    script = section["script"]
    assert script["command"] == case.words(case.command)
    assert (script["kind"], script["sha256"]) == (case.kind, tuned.digest)
    assert script["mean_tokens"] == pytest.approx(case.mean_tokens, rel=0.1)
    # Both figures are rounded in the file: the mean number of tokens to a hundredth of some 25.
    assert script["samples_per_second"] == pytest.approx(section["tokens_per_second"] / script["mean_tokens"], rel=1e-3)
    assert (script["padding"] > 0) == case.padding
    assert 0 <= script["loader_share"] < 1


@pytest.mark.parametrize(
    "tuned",
    [pytest.param(name, marks=[pytest.mark.night] * (name in TRAINS_AT_NIGHT)) for name in CASES],
    indirect=True,
)
def test_the_script_trains_with_the_answer_and_not_with_its_own_settings(tuned: Tuned) -> None:
    words = tuned.case.words(tuned.case.run)
    done = ladder("run", "best_config.json", *(["--", *words] if words else []), folder=tuned.folder)
    assert done.status == 0, done.errors[-3000:]
    assert done.num_left == 0
    assert digest_of(tuned.case.script) == tuned.digest
    tuned.case.check(tuned.case, tuned.folder, done)


@of_cases("causal_trainer at zero3")
def test_the_answer_s_launch_script_trains_the_script_from_any_folder(tuned: Tuned, tmp_path: Path) -> None:
    shutil.rmtree(tuned.folder / "out", ignore_errors=True)  # of another test
    text = (tuned.folder / "best_config.launch.sh").read_text()
    assert "exec torchrun" in text, "the script takes the Trainer's options, so that no ladder is needed"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where `ladder` is
    done = subprocess.run(
        ["bash", str(tuned.folder / "best_config.launch.sh")],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    state = trainer_state(tuned.folder / "out", steps=3)
    assert state["train_batch_size"] == tuned.case.micro_batch
    assert state["epoch"] == pytest.approx(epochs_of(tuned.case, 184, steps=3))
    assert digest_of(tuned.case.script) == tuned.digest
    assert list(tmp_path.iterdir()) == [], "its paths count from the folder of the tune"


@of_cases("grpo_trainer")
def test_trials_of_a_trainer_that_generates_train_on_completions_as_long_as_they_can_get(tuned: Tuned) -> None:
    for log in tuned.folder.glob("ladder-runs/own/trials/0001/rank*.log"):
        written = re.findall(r"wrote completions of \[(.*)\] tokens", log.read_text())
        assert written[0] == "32, 32, 32, 32", "the longest batch has 32 tokens of each, whatever the model ends early"
        assert any(each != written[0] for each in written[1:]), "the usual ones are as long as the model makes them"
    assert tuned.config["ladder"]["script"]["generation_batch_size"] == 8


@pytest.mark.night
@of_cases("causal_loop")
def test_a_loop_that_ends_sooner_than_it_was_to_be_verified_counts_by_the_steps_that_it_made(tuned: Tuned) -> None:
    done = ladder("verify", "best_config.json", "--minutes", "1", "--tolerance", "0.9", folder=tuned.folder)
    assert done.status == 0, done.errors
    (made,) = re.findall(r"(\d+) optimizer steps", done.output)
    assert STEPS < int(made) < 40 * 24, "of as many as the loop makes, without those before the timing"


@of_cases("trl.scripts.sft")
def test_a_script_that_takes_more_memory_than_its_answer_promises_does_not_hold(tuned: Tuned) -> None:
    words = [str(MISBEHAVING / "holds_more.py"), str(tuned.case.script), *tuned.case.words(tuned.case.command)[2:]]
    done = ladder("verify", "best_config.json", "--tolerance", "0.9", "--", *words, folder=tuned.folder)
    assert done.status == 7, done.errors
    said = r"'best_config.json' still fits, but takes 1\.\d+ GiB where it promises [\d.]+ [GM]iB; "
    assert re.search(said, done.errors)
    assert "Warning: the script has changed since it was tuned." in done.errors
    # Before it trained it held two GiB for a moment, which its ranks have seen.
    lines = [line for file in tuned.folder.glob("ladder-runs/verify-*/trials/*/rank*.jsonl") for line in file.open()]
    seen = [event for event in map(json.loads, lines) if event["kind"] == "measured"]
    assert len(seen) == 2
    assert all(event["held_host"] < 2.1 * GIB < event["peak_host"] for event in seen)


_TRANSLATE = "{scripts}/translate_trainer.py --model_name_or_path seq2seq --train_file translation/train.jsonl "
_TRANSLATE += "--output_dir translate-out --do_train --do_eval --predict_with_generate --max_steps"
_QLORA = "{scripts}/qlora_trainer.py --model-path model --train-file text/train.jsonl --output_dir out --use-cpu"
_DPO = "--model_name_or_path model --dataset_name ./pairs --output_dir dpo-out --use_cpu "
_DPO += "--per_device_train_batch_size 4 --max_steps"


@pytest.mark.night
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("command", "run", "kind", "micro_batch"),
    [
        ("{scripts}/masked_trainer.py masked.yaml", "{scripts}/masked_trainer.py longer.yaml", "trainer", 4),
        (f"{_TRANSLATE} 3", f"{_TRANSLATE} {STEPS}", "trainer", 4),
        ("accelerate launch {scripts}/pairs_loop.py", "", "accelerate", 4),
        (f"{_QLORA} --max-steps 8", f"{_QLORA} --max-steps {STEPS}", "trainer", 2),
        (f"trl dpo {_DPO} 2", f"trl dpo {_DPO} {STEPS}", "trainer", 2),
    ],
    ids=["masked", "translate", "pairs", "qlora", "trl dpo"],
)
def test_other_kinds_of_scripts_are_tuned_as_they_are_and_train_with_the_answer(
    command: str, run: str, kind: str, micro_batch: int, tmp_path: Path, script_inputs: Path
) -> None:
    folder, words = folder_with_inputs(tmp_path / "home", script_inputs), command.format(scripts=SCRIPTS).split()
    masked = (SCRIPTS / "masked.yaml").read_text()
    (folder / "masked.yaml").write_text(masked)
    (folder / "longer.yaml").write_text(masked.replace("max_steps: 6", f"max_steps: {STEPS}"))
    if words[0] == "trl":
        script = Path(pytest.importorskip("trl.scripts.dpo").__file__)
    else:
        script = next(Path(word) for word in words if word.endswith(".py"))
    before, digest = files_in(folder), digest_of(script)
    tune = ladder(*tune_options("zero2", micro_batch), *words, folder=folder)
    assert tune.status == 0, tune.errors
    assert tune.num_left == 0
    assert files_in(folder) == before
    section = json.loads((folder / "best_config.json").read_text())["ladder"]
    assert (section["script"]["kind"], section["script"]["sha256"]) == (kind, digest)
    assert section["micro_batch"] == micro_batch
    longer = run.format(scripts=SCRIPTS).split()
    done = ladder("run", "best_config.json", *(["--", *longer] if run else []), folder=folder)
    assert done.status == 0, done.errors[-3000:]
    assert done.num_left == 0
    assert digest_of(script) == digest
    if kind == "trainer":
        assert f"{STEPS}/{STEPS} [" in done.errors, "its progress bar shows every optimizer step"
    else:
        assert "epoch 2: " in done.output, "three epochs of eight steps are over"


@pytest.mark.night
def test_a_loop_with_a_second_model_that_is_not_trained_is_tuned_by_the_one_that_is(
    tmp_path: Path, script_inputs: Path
) -> None:
    folder = folder_with_inputs(tmp_path / "home", script_inputs)
    script = str(SCRIPTS / "two_models_loop.py")
    done = ladder(*tune_options("zero2", 2), script, folder=folder)
    assert done.status == 0, done.errors
    section = json.loads((folder / "best_config.json").read_text())["ladder"]
    assert (section["rung"], section["micro_batch"], section["script"]["kind"]) == ("zero2", 2, "deepspeed")
    started = ladder("run", "best_config.json", "--", script, "--steps", str(STEPS), folder=folder)
    assert started.status == 0, started.errors[-3000:]


def test_the_model_of_a_script_is_planned_for_on_the_command_line_and_in_python(
    tmp_path: Path, script_inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with_inputs(tmp_path / "home", script_inputs)
    words = f"{_TRAINER} --max_steps 3".format(scripts=SCRIPTS).split()
    before = files_in(folder)
    done = ladder("plan", "--gpus", "2", "--gpu-memory", "3GiB", "--format", "json", "--", *words, folder=folder)
    assert done.status == 0, done.errors
    facts = json.loads(done.output)
    assert facts["seq_len"] == 64
    assert facts["expected_winner"] in {row["rung"] for row in facts["rungs"]}
    monkeypatch.chdir(folder)
    planned = api.plan(script=words, gpus=2, gpu_memory="3GiB")
    assert planned.facts["expected_winner"] == facts["expected_winner"]
    assert files_in(folder) == before


@pytest.mark.parametrize(
    "training",
    [
        "Trainer(model, arguments, train_dataset=data, optimizers=(Adafactor(model.parameters()), None)).train()\n",
        "class Own(Trainer):\n"
        "    def create_optimizer(self, model=None):\n"
        "        self.optimizer = Adafactor(self.model.parameters())\n"
        "        return self.optimizer\n"
        "Own(model, arguments, train_dataset=data).train()\n",
    ],
    ids=["given", "made by its trainer"],
)
def test_a_script_is_told_where_another_optimizer_would_take_the_place_of_its_own(
    tmp_path: Path, training: str
) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments\n"
        "from transformers.optimization import Adafactor\n"
        "sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_attention_heads=2)\n"
        "model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))\n"
        'data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 8))]\n'
        'arguments = TrainingArguments("out", max_steps=4, bf16=True, report_to="none", use_cpu=True)\n'
        f"{training}"
    )
    options = ["--gpus", "0", "--nvme-path", ".", "--rung", "zero3+opt-nvme", "--rung", "zero2"]
    done = ladder("tune", *options, "--", "own.py", folder=tmp_path)
    assert done.status == 2
    assert "ZeRO flattens what it divides, and the script's optimizer, Adafactor, would make other steps" in done.errors
    assert "with offload, DeepSpeed's Adam would replace the script's optimizer, Adafactor" in done.errors
