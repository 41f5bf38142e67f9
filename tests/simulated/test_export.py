"""`ladder export`: one answer in eight programs' words, each with the same batch, length and precision."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.answers import answer

from ladder.cli.main import main
from ladder.emit import emit_all
from ladder.emit.config import best_config, load_best_config
from ladder.emit.exporters.registry import EXPORTERS, exported
from ladder.emit.files import OutputPaths
from ladder.emit.launch import launch_script
from ladder.errors import UsageError
from ladder.workload.lora import Lora


@dataclasses.dataclass
class Written:
    """An answer in its file, exported with changes to ladder's own section."""

    path: Path

    def __post_init__(self) -> None:
        self.document = load_best_config(self.path)
        self.section = self.document["ladder"]

    def text(self, target: str, **changes: Any) -> str:
        return exported({**self.document, "ladder": {**self.section, **changes}}, self.path, target)

    def words(self, target: str, **changes: Any) -> dict[str, Any]:
        words: dict[str, Any] = yaml.safe_load(self.text(target, **changes))
        return words


@pytest.fixture(scope="module")
def written(simulated_run: Path) -> Written:
    return Written(simulated_run.parent / "best_config.json")


def _asked_of_slurm(text: str) -> dict[str, str]:
    return dict(line.removeprefix("#SBATCH --").split("=") for line in text.splitlines() if line.startswith("#SBATCH"))


def test_the_trainer_and_accelerate_get_what_the_tune_wrote_beside_the_answer_and_deepspeed_its_own_keys_alone(
    written: Written,
) -> None:
    assert written.text("trainer") == written.path.with_name("best_config.trainer.json").read_text()
    lines = written.text("accelerate").splitlines(keepends=True)
    accelerate = "".join(line for line in lines if line[0] != "#")
    assert accelerate == written.path.with_name("best_config.accelerate.yaml").read_text()
    own = {name: value for name, value in written.document.items() if name != "ladder"}
    assert json.loads(written.text("deepspeed")) == own


# The programs' own names for it: their schemas, as published.
NAMES = {
    "axolotl": ("micro_batch_size", "sequence_len", "base_model"),
    "llama-factory": ("per_device_train_batch_size", "cutoff_len", "model_name_or_path"),
    "trl": ("per_device_train_batch_size", "max_length", "model_name_or_path"),
}


@pytest.mark.parametrize("target", NAMES)
def test_every_program_trains_the_same(target: str, written: Written) -> None:
    fragment, answer, workload = written.words(target), written.section, written.section["workload"]
    named = [fragment[name] for name in NAMES[target]]
    assert named == [answer["micro_batch"], workload["seq_len"], "your model"]
    assert fragment["gradient_accumulation_steps"] == answer["accumulation"]
    assert fragment["max_grad_norm"] == workload["gradient_clipping"]
    assert fragment["optimizer" if target == "axolotl" else "optim"] == "adamw_torch_fused"
    for dtype in ("bf16", "fp16"):
        found = written.words(target, workload={**workload, "dtype": dtype})
        assert {name for name in ("bf16", "fp16") if found.get(name)} == {dtype}
    with pytest.raises(UsageError, match=f"--for {target}: it trains only causal-lm models"):
        written.text(target, workload={**workload, "task": "masked-lm"})


@pytest.mark.parametrize("on", [True, False])
def test_checkpointing_is_switched_by_each_program_s_own_name(on: bool, written: Written) -> None:
    # A transformers whose own name for it these programs do not know.
    changes = {"checkpoint_every": int(on), "versions": {"transformers": "5.23.0"}}
    factory, axolotl, trl = (written.words(name, **changes) for name in ("llama-factory", "axolotl", "trl"))
    assert factory["disable_gradient_checkpointing"] is not on
    assert "gradient_checkpointing" not in factory
    assert factory.get("use_reentrant_gc", True) is not on
    for fragment in (axolotl, trl):
        assert fragment["gradient_checkpointing"] is on
        assert fragment.get("gradient_checkpointing_kwargs") == ({"use_reentrant": False} if on else None)
        assert "activation_checkpointing" not in fragment


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize(
    ("model", "loadable"),
    [
        ({"name": "org/model", "source": "hub"}, "org/model"),
        ({"name": "meta-llama/Llama-2-7b-hf", "source": "bundled"}, "meta-llama/Llama-2-7b-hf"),
        ({"name": "mine/config.json", "source": "file", "folder": "/models/mine"}, "/models/mine"),
        ({"name": "shape.json", "source": "file"}, "your model"),
        ({"name": "a\nmicro_batch_size: 7", "source": "bundled"}, "your model"),
    ],
)
def test_the_model_is_one_to_load_or_the_user_s_to_name(
    target: str, model: dict[str, str], loadable: str, written: Written
) -> None:
    text = written.text(target, model={"folder": None, **model})
    assert yaml.safe_load(text)[NAMES[target][2]] == loadable
    assert yaml.safe_load(text).get("micro_batch_size") != 7
    assert ("# Replace `your model` with the name of your model: " in text) is (loadable == "your model")


@pytest.mark.parametrize("target", ["trl", "trainer", "accelerate", "axolotl"])
def test_what_is_exported_from_the_run_folder_names_files_that_are_there(target: str, simulated_run: Path) -> None:
    text = Written(simulated_run / "best_config.json").text(target)
    named = re.findall(r"/\S[^\n\"']*best_config\.[a-z.]+", text)
    assert named
    assert [name for name in named if Path(name).parent != simulated_run or not Path(name).is_file()] == []
    assert "ladder export" not in text


def test_a_copy_without_its_companion_says_how_to_make_it(
    written: Written, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(written.path, "my copy.json")
    assert main(["export", "my copy.json", "--for", "trl"]) == 0
    text = capsys.readouterr().out
    assert "\ndeepspeed:" not in text, "it is named in accelerate's file"
    (making,) = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ladder export")]
    assert main(shlex.split(making)[1:]) == 0
    assert Path(yaml.safe_load(text)["accelerate_config"]).is_file()
    capsys.readouterr()
    assert main(["export", "my copy.json", "--for", "trl"]) == 0
    assert "ladder export" not in capsys.readouterr().out


def test_an_output_that_is_no_file_or_the_answer_itself_is_refused_in_a_sentence(
    written: Written, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(written.path, "best_config.json")
    (folder / "link.json").symlink_to("best_config.json")
    (folder / "folder").mkdir()
    outputs = dict.fromkeys((".", "", "folder"), "exported.yaml")
    outputs |= dict.fromkeys(("best_config.json", str(folder / "best_config.json"), "link.json"), "replace the answer")
    for output, words in outputs.items():
        assert main(["export", "--output", output]) == 2
        printed = capsys.readouterr().err
        assert words in printed
        assert printed.count("\n") == 1
    assert Path("best_config.json").read_bytes() == written.path.read_bytes()


@pytest.mark.parametrize(
    ("target", "form", "words"),
    [
        ("torchrun", [], ["torchrun", "16", "--standalone", "--nproc_per_node", "8"]),
        ("sbatch", ["--trainer"], ["srun", "16", "--cpus-per-task=128", "torchrun", "--standalone"]),
        ("sbatch", [], ["srun", "16", "--cpus-per-task=128", "accelerate", "launch", "--config_file"]),
    ],
)
def test_the_scripts_are_bash_and_run_the_script_they_are_given(
    target: str, form: list[str], words: list[str], written: Written, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    assert main(["export", str(written.path), "--for", target, "--output", str(script)]) == 0
    for program in ("torchrun", "srun"):  # print what they are asked to do
        (tmp_path / program).write_text('#!/bin/sh\necho "$(basename "$0")" "$OMP_NUM_THREADS" "$@"\n')
        (tmp_path / program).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [str(script), *form, "my train.py", "--lr", "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.split()[: len(words)] == words
    if "accelerate" in words:
        assert done.stdout.endswith(f"--deepspeed_config_file {written.path} my train.py --lr 1\n")
    else:
        assert "my train.py --lr 1 --deepspeed" in done.stdout
    without = subprocess.run([str(script), *form], check=False, capture_output=True, text=True, env=environment)
    assert (without.returncode, without.stdout) == (2, "")
    assert "train.py [its arguments]" in without.stderr


def test_a_job_says_which_file_is_missing_before_it_starts_anything(written: Written, tmp_path: Path) -> None:
    moved, script = tmp_path / "moved.json", tmp_path / "job.sh"
    shutil.copy(written.path, moved)
    assert main(["export", str(moved), "--for", "sbatch", "--output", str(script)]) == 0
    said = []
    for _ in range(2):
        done = subprocess.run([str(script), "train.py"], check=False, capture_output=True, text=True)
        assert done.returncode == 2
        said.append(done.stderr)
        moved.unlink(missing_ok=True)
    assert "moved.accelerate.yaml cannot be read; make it with: ladder export" in said[0]
    assert "moved.json cannot be read; it was moved or removed" in said[1]


def test_llama_factory_is_told_what_to_do_and_keeps_the_allocator_s_settings(written: Written) -> None:
    fragment = written.words("llama-factory")
    assert (fragment["stage"], fragment["do_train"], fragment["finetuning_type"]) == ("sft", True, "full")
    command = written.text("llama-factory").splitlines()[1]
    assert command.startswith("#   OMP_NUM_THREADS=")
    assert command.endswith(" OPTIM_TORCH=0 FORCE_TORCHRUN=1 NPROC_PER_NODE=8 llamafactory-cli train your.yaml")


def test_sbatch_asks_for_what_was_measured_and_what_a_cluster_asks_for_is_there_to_be_filled_in(
    written: Written,
) -> None:
    text = written.text("sbatch")
    asked = _asked_of_slurm(text)
    assert (asked["job-name"], asked["output"], asked["gpus-per-node"]) == ("llama-2-7b", "%x-%j.out", "8")
    assert int(asked["cpus-per-task"]) == 8 * int(written.section["environment"]["OMP_NUM_THREADS"])
    assert shlex.split(text.splitlines()[-1])[:2] == ["srun", f"--cpus-per-task={asked['cpus-per-task']}"]
    assert "Usage:\n#   sbatch job.sh train.py" in text
    for name in ("time", "account", "partition"):
        assert f"\n##SBATCH --{name}=" in text
        assert name not in asked


WITH_COMMENTS = ["accelerate", "axolotl", "llama-factory", "trl", "torchrun", "sbatch"]


def test_all_but_json_holds_the_warnings_such_as_that_an_answer_is_simulated(written: Written) -> None:
    for target in EXPORTERS:
        text = written.text(target)
        if target in WITH_COMMENTS:
            assert "\n# Warning: simulated on a100-40: " in "\n" + text
        else:
            assert "simulated on" not in json.dumps(json.loads(text))


@pytest.mark.parametrize("target", WITH_COMMENTS)
def test_no_warning_breaks_out_of_its_comment(target: str, written: Written) -> None:
    breaks = "\n\r\x0b\x0c\x1c\x85\u2028\u2029\x00\x1b"
    warnings = [f"paper machine {each}#SBATCH --mem=1G\nmicro_batch_size: 7\ntouch it" for each in breaks]
    text = written.text(target, warnings=warnings)
    harmless = written.text(target, warnings=[])
    assert text.count("# Warning: paper machine ") == len(breaks)
    kept = [line for line in text.splitlines() if not line.startswith("# Warning: ")]
    assert kept == harmless.splitlines()
    assert text.isprintable() or set(filter(lambda each: not each.isprintable(), text)) == {"\n"}


def test_an_answer_for_several_nodes_says_so_in_its_job(tmp_path: Path) -> None:
    path = tmp_path / "best_config.json"
    emit_all(answer("zero3", world_size=16, num_nodes=2, workload={"global_batch_size": 128}), path)
    job, axolotl, factory = (Written(path).text(name) for name in ("sbatch", "axolotl", "llama-factory"))
    assert "#SBATCH --nodes=2\n" in job
    assert "#SBATCH --gpus-per-node=8\n" in job
    assert job.count('--rdzv_endpoint "$head:$port"') == 1
    assert "--machine_rank" in job
    assert "--nproc_per_node=8 --nnodes=2 " in axolotl
    assert "NPROC_PER_NODE=8 NNODES=2 " in factory
    launch = path.with_suffix(".launch.sh").read_text()
    assert "srun --nodes=2 --ntasks-per-node=1 bash best_config.launch.sh" in launch


ADAPTERS = Lora(rank=16, alpha=32, dropout=0.05)


def words_for(target: str, **workload: Any) -> dict[str, Any]:
    """What `target` is told of an answer with adapters."""
    document = best_config(answer("zero2", workload=workload))
    words: dict[str, Any] = yaml.safe_load(exported(document, Path("best_config.json"), target))
    return words


IN_WORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "trl": ({"use_peft": True, "lora_r": 16, "lora_target_modules": ["all-linear"]}, {"load_in_4bit": True}),
    "axolotl": ({"adapter": "lora", "lora_r": 16, "lora_target_linear": True}, {"adapter": "qlora"}),
    "llama-factory": (
        {"finetuning_type": "lora", "lora_rank": 16, "lora_target": "all"},
        {"quantization_bit": 4, "quantization_method": "bnb"},
    ),
}


@pytest.mark.parametrize("target", IN_WORDS)
def test_each_program_gets_adapters_and_quantisation_in_its_own_words(target: str) -> None:
    adapters, quantised = IN_WORDS[target]
    plain = words_for(target, lora=ADAPTERS)
    assert plain.items() >= {**adapters, "lora_alpha": 32, "lora_dropout": 0.05}.items()
    assert words_for(target, lora=ADAPTERS, load_in="4bit").items() >= quantised.items()
    named = words_for(target, lora=Lora(targets=("q_proj", "v_proj")))
    assert "q_proj" in str(named["lora_target" if target == "llama-factory" else "lora_target_modules"])
    copied = Lora.from_peft({"modules_to_save": {"lm_head"}})
    assert ["lm_head"] in words_for(target, lora=copied).values()
    with pytest.raises(UsageError, match=r"it has no word for rank_pattern of adapters; use --for trainer"):
        words_for(target, lora=Lora.from_peft({"rank_pattern": {"q_proj": 4}}))
    with pytest.raises(UsageError, match=r"it cannot freeze model\.embed_tokens as it was measured"):
        words_for(target, freeze=("model.embed_tokens",))


def test_trl_itself_makes_the_same_adapters_of_its_words() -> None:
    trl = pytest.importorskip("trl")
    known = {field.name for field in dataclasses.fields(trl.ModelConfig)}

    def made_of(lora: Lora) -> Any:
        words = words_for("trl", lora=lora)
        return trl.get_peft_config(trl.ModelConfig(**{name: words[name] for name in known & words.keys()}))

    more = Lora.from_peft({"modules_to_save": ["lm_head"], "target_modules": r".*attn\.(q|v)_proj"})
    for adapters in (ADAPTERS, more):
        assert Lora.from_peft(vars(made_of(adapters))) == adapters
    assert re.fullmatch(made_of(Lora(targets=("c_attn",))).target_modules, "transformer.h.0.attn.c_attn")


def test_the_launch_script_says_which_adapters_the_script_has_to_make() -> None:
    found = answer("zero2", workload={"lora": ADAPTERS, "load_in": "4bit"})
    text = launch_script(found, OutputPaths.beside(Path("best_config.json")))
    assert "peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules='all-linear'" in text
    assert "must be loaded in 4bit" in text
