"""`ladder export`: one answer in eight programs' words, each with the same batch, length and precision."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from helpers.answers import answer

from ladder.cli.export import Exported
from ladder.cli.main import main
from ladder.emit.config import best_config, load_best_config
from ladder.emit.exporters.registry import EXPORTERS as EXPORTS
from ladder.emit.exporters.registry import exported
from ladder.emit.files import OutputPaths
from ladder.emit.launch import launch_script
from ladder.errors import UsageError
from ladder.tuning.declaring import declared
from ladder.workload.lora import Lora
from ladder.workload.trained import LoadIn


@pytest.fixture(scope="module")
def config(simulated_run: Path) -> Path:
    return simulated_run.parent / "best_config.json"


@pytest.fixture(scope="module")
def document(config: Path) -> dict[str, Any]:
    return load_best_config(config)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _with(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same answer with other figures in ladder's section."""
    return {**document, "ladder": {**document["ladder"], **changes}}


def _asked_of_slurm(text: str) -> dict[str, str]:
    return dict(line.removeprefix("#SBATCH --").split("=") for line in text.splitlines() if line.startswith("#SBATCH"))


def test_the_command_knows_every_export() -> None:
    assert set(get_args(declared(Exported)["target"].kind.typed)) == set(EXPORTS)


def test_the_trainer_and_accelerate_get_what_the_tune_wrote_beside_the_answer(
    config: Path, document: dict[str, Any]
) -> None:
    assert exported(document, config, "trainer") == config.with_name("best_config.trainer.json").read_text()
    accelerate = "".join(line for line in _lines(exported(document, config, "accelerate")) if line[0] != "#")
    assert accelerate == config.with_name("best_config.accelerate.yaml").read_text()


def test_deepspeed_gets_its_own_keys_alone(config: Path, document: dict[str, Any]) -> None:
    assert json.loads(exported(document, config, "deepspeed")) == {k: v for k, v in document.items() if k != "ladder"}


# The programs' own names for it: their schemas, as published.
NAMES = {
    "axolotl": {
        "batch": "micro_batch_size",
        "length": "sequence_len",
        "model": "base_model",
        "optimizer": "optimizer",
    },
    "llama-factory": {"batch": "per_device_train_batch_size", "length": "cutoff_len", "model": "model_name_or_path"},
    "trl": {"batch": "per_device_train_batch_size", "length": "max_length", "model": "model_name_or_path"},
}


@pytest.mark.parametrize("target", NAMES)
def test_every_program_trains_the_same(target: str, config: Path, document: dict[str, Any]) -> None:
    fragment, names, answer = yaml.safe_load(exported(document, config, target)), NAMES[target], document["ladder"]
    assert fragment[names["batch"]] == answer["micro_batch"]
    assert fragment[names["length"]] == answer["workload"]["seq_len"]
    assert fragment[names["model"]] == "your model"
    assert fragment["gradient_accumulation_steps"] == answer["accumulation"]
    assert fragment[answer["workload"]["dtype"]] is True
    assert fragment["max_grad_norm"] == answer["workload"]["gradient_clipping"]
    assert fragment[names.get("optimizer", "optim")] == "adamw_torch_fused"


@pytest.mark.parametrize("on", [True, False])
def test_checkpointing_is_switched_by_each_program_s_own_name(on: bool, config: Path, document: dict[str, Any]) -> None:
    answer = {**document, "ladder": {**document["ladder"], "checkpoint_every": int(on)}}
    factory, axolotl = (yaml.safe_load(exported(answer, config, name)) for name in ("llama-factory", "axolotl"))
    assert factory["disable_gradient_checkpointing"] is not on
    assert "gradient_checkpointing" not in factory
    assert factory.get("use_reentrant_gc", True) is not on
    assert axolotl["gradient_checkpointing"] is on
    assert ("gradient_checkpointing_kwargs" in axolotl) is on


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_axolotl_is_told_of_both_precisions(dtype: str, config: Path, document: dict[str, Any]) -> None:
    answer = document["ladder"]
    changed = {**document, "ladder": {**answer, "workload": {**answer["workload"], "dtype": dtype}}}
    fragment = yaml.safe_load(exported(changed, config, "axolotl"))
    assert {name for name in ("bf16", "fp16") if fragment[name]} == {dtype}


@pytest.mark.parametrize("target", NAMES)
def test_a_program_gets_no_task_that_it_does_not_train(target: str, config: Path, document: dict[str, Any]) -> None:
    answer = document["ladder"]
    other = {**document, "ladder": {**answer, "workload": {**answer["workload"], "task": "masked-lm"}}}
    with pytest.raises(UsageError, match=f"--for {target}: it trains only causal-lm models"):
        exported(other, config, target)


def test_deepspeed_is_named_once_in_what_trl_gets(config: Path, document: dict[str, Any]) -> None:
    fragment = yaml.safe_load(exported(document, config, "trl"))
    assert "deepspeed" not in fragment
    assert Path(fragment["accelerate_config"]).is_file()


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize(
    ("model", "loadable"),
    [
        ({"name": "org/model", "source": "hub"}, "org/model"),
        ({"name": "gpt2", "source": "hub"}, "gpt2"),
        ({"name": "meta-llama/Llama-2-7b-hf", "source": "bundled"}, "meta-llama/Llama-2-7b-hf"),
        ({"name": "mine", "source": "folder", "folder": "/models/mine"}, "/models/mine"),
        ({"name": "mine/config.json", "source": "file", "folder": "/models/mine"}, "/models/mine"),
        ({"name": "shape.json", "source": "file"}, "your model"),
        ({"name": "a\nmicro_batch_size: 7", "source": "bundled"}, "your model"),
    ],
)
def test_the_model_is_one_to_load_or_the_user_s_to_name(
    target: str, model: dict[str, str], loadable: str, config: Path, document: dict[str, Any]
) -> None:
    found = {"folder": None, **model}
    text = exported({**document, "ladder": {**document["ladder"], "model": found}}, config, target)
    assert yaml.safe_load(text)[NAMES[target]["model"]] == loadable
    assert yaml.safe_load(text).get("micro_batch_size") != 7
    assert ("# Replace `your model` with the name of your model: " in text) is (loadable == "your model")


@pytest.mark.parametrize("version", ["5.22.0", "5.23.0"])
def test_programs_built_on_the_trainer_get_the_name_of_checkpointing_that_they_know(
    version: str, config: Path, document: dict[str, Any]
) -> None:
    section = {**document["ladder"], "checkpoint_every": 1, "versions": {"transformers": version}}
    answer = {**document, "ladder": section}
    for target in ("axolotl", "trl"):
        fragment = yaml.safe_load(exported(answer, config, target))
        assert fragment["gradient_checkpointing"] is True
        assert fragment["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    for target in NAMES:
        assert "activation_checkpointing" not in exported(answer, config, target)


@pytest.mark.parametrize("target", ["trl", "trainer", "accelerate", "axolotl"])
def test_what_is_exported_from_the_run_folder_names_files_that_are_there(
    target: str, simulated_run: Path, document: dict[str, Any]
) -> None:
    text = exported(document, simulated_run / "best_config.json", target)
    named = re.findall(r"/\S[^\n\"']*best_config\.[a-z.]+", text)
    assert named
    assert [name for name in named if Path(name).parent != simulated_run or not Path(name).is_file()] == []
    assert "ladder export" not in text


def test_a_copy_without_its_companion_says_how_to_make_it(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "my copy.json"
    shutil.copy(config, copy)
    assert main(["export", str(copy), "--for", "trl"]) == 0
    text = capsys.readouterr().out
    (making,) = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ladder export")]
    assert main(shlex.split(making)[1:]) == 0
    assert Path(yaml.safe_load(text)["accelerate_config"]).is_file()
    capsys.readouterr()
    assert main(["export", str(copy), "--for", "trl"]) == 0
    assert "ladder export" not in capsys.readouterr().out


@pytest.mark.parametrize("output", [".", "", "..", "folder"])
def test_an_output_that_is_no_file_is_refused_in_a_sentence(
    output: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert main(["export", str(config), "--output", output]) == 2
    printed = capsys.readouterr().err
    assert "exported.yaml" in printed
    assert printed.count("\n") == 1


def test_the_answer_is_not_overwritten_by_what_is_exported_from_it(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(config, "best_config.json")
    (tmp_path / "link.json").symlink_to("best_config.json")
    for output in ("best_config.json", str(tmp_path / "best_config.json"), "link.json"):
        assert main(["export", "--for", "torchrun", "--output", output]) == 2
        assert "would replace the answer" in capsys.readouterr().err
    assert Path("best_config.json").read_bytes() == config.read_bytes()


@pytest.mark.parametrize("command", ["export", "verify"])
def test_a_file_nested_without_end_is_one_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep.json").write_text("[" * 200_000)
    assert main([command, str(tmp_path / "deep.json")]) == 2
    printed = capsys.readouterr().err
    assert "nested too deeply" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("target", "form", "words"),
    [
        ("torchrun", [], ["torchrun", "16", "--standalone", "--nproc_per_node", "8"]),
        ("sbatch", ["--trainer"], ["srun", "16", "--cpus-per-task=128", "torchrun", "--standalone"]),
        ("sbatch", [], ["srun", "16", "--cpus-per-task=128", "accelerate", "launch", "--config_file"]),
    ],
)
def test_the_scripts_are_bash_and_run_the_script_they_are_given(
    target: str, form: list[str], words: list[str], config: Path, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    assert main(["export", str(config), "--for", target, "--output", str(script)]) == 0
    for program in ("torchrun", "srun"):  # print what they are asked to do
        (tmp_path / program).write_text('#!/bin/sh\necho "$(basename "$0")" "$OMP_NUM_THREADS" "$@"\n')
        (tmp_path / program).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [str(script), *form, "my train.py", "--lr", "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.split()[: len(words)] == words
    if "accelerate" in words:
        assert done.stdout.endswith(f"--deepspeed_config_file {config} my train.py --lr 1\n")
    else:
        assert "my train.py --lr 1 --deepspeed" in done.stdout
    without = subprocess.run([str(script), *form], check=False, capture_output=True, text=True, env=environment)
    assert (without.returncode, without.stdout) == (2, "")
    assert "train.py [its arguments]" in without.stderr


def test_a_job_says_which_file_is_missing_before_it_starts_anything(config: Path, tmp_path: Path) -> None:
    moved, script = tmp_path / "moved.json", tmp_path / "job.sh"
    shutil.copy(config, moved)
    assert main(["export", str(moved), "--for", "sbatch", "--output", str(script)]) == 0
    said = []
    for _ in range(2):
        done = subprocess.run([str(script), "train.py"], check=False, capture_output=True, text=True)
        assert done.returncode == 2
        said.append(done.stderr)
        moved.unlink(missing_ok=True)
    assert "moved.accelerate.yaml cannot be read; make it with: ladder export" in said[0]
    assert "moved.json cannot be read; it was moved or removed" in said[1]


def test_what_a_cluster_asks_for_is_there_to_be_filled_in(config: Path, document: dict[str, Any]) -> None:
    text = exported(document, config, "sbatch")
    asked = _asked_of_slurm(text)
    assert (asked["job-name"], asked["output"]) == ("llama-2-7b", "%x-%j.out")
    assert "Usage:\n#   sbatch job.sh train.py" in text
    for name in ("time", "account", "partition"):
        assert f"\n##SBATCH --{name}=" in text
        assert name not in asked


def test_llama_factory_is_told_what_to_do(config: Path, document: dict[str, Any]) -> None:
    fragment = yaml.safe_load(exported(document, config, "llama-factory"))
    assert (fragment["stage"], fragment["do_train"], fragment["finetuning_type"]) == ("sft", True, "full")


def test_llama_factory_keeps_the_allocator_s_settings(config: Path, document: dict[str, Any]) -> None:
    command = exported(document, config, "llama-factory").splitlines()[1]
    assert command.startswith("#   OMP_NUM_THREADS=")
    assert command.endswith(" OPTIM_TORCH=0 FORCE_TORCHRUN=1 NPROC_PER_NODE=8 llamafactory-cli train your.yaml")


def test_sbatch_asks_for_the_gpus_and_cores_that_were_measured(config: Path, document: dict[str, Any]) -> None:
    text = exported(document, config, "sbatch")
    asked = _asked_of_slurm(text)
    assert asked["gpus-per-node"] == "8"
    assert int(asked["cpus-per-task"]) == 8 * int(document["ladder"]["environment"]["OMP_NUM_THREADS"])
    assert shlex.split(text.splitlines()[-1])[:2] == ["srun", f"--cpus-per-task={asked['cpus-per-task']}"]


@pytest.mark.parametrize(
    ("ranks", "held", "asked"),
    [
        (8, 400.0, "472G"),  # 400 + 40 + 8 × 4
        (8, 14.93, "49G"),  # 16.4 + 32, rounded up
        (1, 0.5, "5G"),
    ],
)
def test_sbatch_asks_for_the_host_memory_that_was_measured_and_some_for_data_loaders(
    ranks: int, held: float, asked: str, config: Path, document: dict[str, Any]
) -> None:
    text = exported(_with(document, world_size=ranks, host_memory_gib=held), config, "sbatch")
    assert _asked_of_slurm(text)["mem"] == asked
    # sbatch reads no further than the first line that is no comment.
    before, _, after = text.partition("#SBATCH --mem")
    assert all(line.startswith("#") for line in before.splitlines())
    assert f"the ranks used {held:.2f} GiB when this was measured" in before
    assert "Data loaders, and loading the weights, may need more" in before
    assert after.splitlines()[1] == "set -euo pipefail"


WITH_COMMENTS = ["accelerate", "axolotl", "llama-factory", "trl", "torchrun", "sbatch"]


@pytest.mark.parametrize("target", WITH_COMMENTS)
def test_an_export_says_what_the_answer_warns_of(target: str, config: Path, document: dict[str, Any]) -> None:
    said = ["its states are bf16", "thin headroom: 1.0% of memory left at the peak"]
    lines = exported(_with(document, warnings=said), config, target).splitlines()
    assert [line for line in lines if "Warning" in line] == [f"# Warning: {warning}." for warning in said]
    assert "Warning" not in exported(_with(document, warnings=[]), config, target)


def test_an_export_of_a_simulated_answer_says_so(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target in WITH_COMMENTS:
        assert main(["export", str(config), "--for", target]) == 0
        assert "\n# Warning: simulated on a100-40: " in "\n" + capsys.readouterr().out


@pytest.mark.parametrize("target", WITH_COMMENTS)
def test_no_warning_breaks_out_of_its_comment(target: str, config: Path, document: dict[str, Any]) -> None:
    breaks = "\n\r\x0b\x0c\x1c\x85\u2028\u2029\x00\x1b"
    warnings = [f"paper machine {each}#SBATCH --mem=1G\nmicro_batch_size: 7\ntouch it" for each in breaks]
    text = exported(_with(document, warnings=warnings), config, target)
    harmless = exported(_with(document, warnings=[]), config, target)
    assert text.count("# Warning: paper machine ") == len(breaks)
    kept = [line for line in text.splitlines() if not line.startswith("# Warning: ")]
    assert kept == harmless.splitlines()
    assert text.isprintable() or set(filter(lambda each: not each.isprintable(), text)) == {"\n"}


def test_all_but_json_holds_the_warnings(config: Path, document: dict[str, Any]) -> None:
    answer = _with(document, warnings=["its states are bf16"])
    silent = {target for target in EXPORTS if "its states are bf16" not in exported(answer, config, target)}
    assert silent == {"trainer", "deepspeed"}
    for target in silent:
        json.loads(exported(answer, config, target))


def test_an_answer_for_several_nodes_says_so_in_its_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = tmp_path / "best_config.json"
    paper = ["--launcher", "simulated", "--machine", "a100-40", "--gpus", "16"]  # which has 8 in a node
    files = ["--output", str(answer), "--run-dir", str(tmp_path / "run")]
    assert main(["tune", "llama-2-7b", "--quiet", *paper, *files]) == 0
    capsys.readouterr()
    assert main(["export", str(answer), "--for", "sbatch"]) == 0
    job = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in job
    assert "#SBATCH --gpus-per-node=8\n" in job
    assert job.count('--rdzv_endpoint "$head:$port"') == 1
    assert "--machine_rank" in job
    assert main(["export", str(answer), "--for", "axolotl"]) == 0
    assert "--nproc_per_node=8 --nnodes=2 " in capsys.readouterr().out
    assert main(["export", str(answer), "--for", "llama-factory"]) == 0
    assert "NPROC_PER_NODE=8 NNODES=2 " in capsys.readouterr().out
    assert (
        "srun --nodes=2 --ntasks-per-node=1 bash best_config.launch.sh" in answer.with_suffix(".launch.sh").read_text()
    )


def test_a_file_that_was_edited_is_not_exported(
    config: Path, document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = tmp_path / "best_config.json"
    edited.write_text(json.dumps({**document, "gradient_clipping": 7}))
    assert main(["export", str(edited)]) == 2
    assert "changed after ladder wrote it" in capsys.readouterr().err


ADAPTERS = Lora(rank=16, alpha=32, dropout=0.05)


def _with_adapters(lora: Lora, load_in: LoadIn | None = None) -> dict[str, Any]:
    return best_config(answer("zero2", workload={"lora": lora, "load_in": load_in}))


IN_WORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "trl": ({"use_peft": True, "lora_r": 16, "lora_target_modules": ["all-linear"]}, {"load_in_4bit": True}),
    "axolotl": ({"adapter": "lora", "lora_r": 16, "lora_target_linear": True}, {"adapter": "qlora"}),
    "llama-factory": (
        {"finetuning_type": "lora", "lora_rank": 16, "lora_target": "all"},
        {"quantization_bit": 4, "quantization_method": "bnb"},
    ),
}


@pytest.mark.parametrize("target", IN_WORDS)
def test_each_program_gets_adapters_and_quantisation_in_its_own_words(target: str, config: Path) -> None:
    adapters, quantised = IN_WORDS[target]
    plain: dict[str, Any] = yaml.safe_load(exported(_with_adapters(ADAPTERS), config, target))
    assert plain.items() >= {**adapters, "lora_alpha": 32, "lora_dropout": 0.05}.items()
    in_4_bits: dict[str, Any] = yaml.safe_load(exported(_with_adapters(ADAPTERS, "4bit"), config, target))
    assert in_4_bits.items() >= quantised.items()
    named = yaml.safe_load(exported(_with_adapters(Lora(targets=("q_proj", "v_proj"))), config, target))
    assert "q_proj" in str(named["lora_target" if target == "llama-factory" else "lora_target_modules"])


def test_trl_itself_makes_the_same_adapters_of_its_words(config: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    words = yaml.safe_load(exported(_with_adapters(ADAPTERS), config, "trl"))
    known = {field.name for field in dataclasses.fields(trl.ModelConfig)}
    asked = trl.ModelConfig(**{name: value for name, value in words.items() if name in known})
    assert Lora.from_peft(vars(trl.get_peft_config(asked))) == ADAPTERS
    one = yaml.safe_load(exported(_with_adapters(Lora(targets=("c_attn",))), config, "trl"))
    pattern = trl.get_peft_config(
        trl.ModelConfig(use_peft=True, lora_target_modules=one["lora_target_modules"])
    ).target_modules
    assert re.fullmatch(pattern, "transformer.h.0.attn.c_attn")


@pytest.mark.parametrize("target", IN_WORDS)
def test_a_program_that_cannot_freeze_the_same_modules_is_refused(target: str, config: Path) -> None:
    document = best_config(answer("zero2", workload={"freeze": ("model.embed_tokens",)}))
    with pytest.raises(UsageError, match=r"it cannot freeze model\.embed_tokens as it was measured"):
        exported(document, config, target)


def test_the_launch_script_says_which_adapters_the_script_has_to_make() -> None:
    found = answer("zero2", workload={"lora": ADAPTERS, "load_in": "4bit"})
    text = launch_script(found, OutputPaths.beside(Path("best_config.json")))
    assert "peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules='all-linear'" in text
    assert "must be loaded in 4bit" in text
