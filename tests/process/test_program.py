"""Which Python program a command runs, whatever launches it; and what is found in the samples of its data loader."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scripts import MISBEHAVING
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ladder.errors import UsageError
from ladder.trial.script.elsewhere import may_train, words_of
from ladder.trial.script.hold import installed_since
from ladder.trial.script.program import Program, program_of
from ladder.trial.script.samples import Samples, WholeBatchesError, count_tokens, rebatched, shape_of

# The program


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and a package, as a user has them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine", "mine.train", "llamafactory"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # that of another test
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv)\n")
    (tmp_path / "mine").mkdir()
    for name in ("__init__", "__main__", "train"):
        (tmp_path / "mine" / f"{name}.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "train.py --x 1",
        "python train.py --x 1",
        "python3 -u train.py --x 1",
        "/usr/bin/python3.11 -X utf8 -W ignore train.py --x 1",
        "torchrun --nproc_per_node 2 train.py --x 1",
        "torchrun --standalone --nproc-per-node=2 train.py --x 1",
        "python -m torch.distributed.run --nproc_per_node 2 train.py --x 1",
        "accelerate launch --num_processes 2 --use_deepspeed train.py --x 1",
        "python -m accelerate.commands.launch --num_processes 2 train.py --x 1",
        "deepspeed --no_local_rank --num_gpus 2 train.py --x 1",
        "python -m torch.distributed.launch --use-env --nproc_per_node 2 train.py --x 1",
    ],
)
def test_a_script_is_found_behind_every_launcher(command: str, here: Path) -> None:
    is_plain = "--use_deepspeed" not in command
    assert program_of(command.split()) == Program("train.py", False, ("--x", "1"), is_plain=is_plain)


@pytest.mark.parametrize(
    ("launcher", "option"),
    [("deepspeed --num_gpus 2", "--local_rank"), ("python -m torch.distributed.launch", "--local-rank")],
)
def test_a_script_is_told_its_number_by_the_option_that_its_launcher_would_add(
    launcher: str, option: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(sys, "argv", ["ladder"])
    program_of(f"{launcher} train.py --x 1".split()).run()
    assert capsys.readouterr().out == f"['train.py', '{option}=3', '--x', '1']\n"


def test_precision_and_accumulation_in_accelerate_s_own_file_count_as_what_the_script_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    file = {"distributed_type": "DEEPSPEED", "mixed_precision": "fp16", "num_processes": 2, "use_cpu": False}
    file |= {"compute_environment": "LOCAL_MACHINE", "debug": False}
    (tmp_path / "own.yaml").write_text(json.dumps(file | {"deepspeed_config": {"gradient_accumulation_steps": 8}}))
    command = ["accelerate", "launch", "--config_file", "own.yaml", "train.py"]
    told = {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}
    assert program_of(command).environment == told
    assert program_of([*command[:2], "--mixed_precision", "bf16", *command[2:]]).environment == told | {
        "ACCELERATE_MIXED_PRECISION": "bf16"
    }
    with pytest.raises(UsageError, match=r"There is no accelerate configuration missing\.yaml here"):
        program_of(["accelerate", "launch", "--config_file", "missing.yaml", "train.py"])


@pytest.mark.parametrize("way", ["an option", "accelerate's file"])
def test_precision_and_accumulation_in_a_deepspeed_file_for_accelerate_count_too(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "gradient_accumulation_steps": 4}))
    file = {"distributed_type": "DEEPSPEED", "num_processes": 2, "use_cpu": False, "debug": False}
    file |= {"compute_environment": "LOCAL_MACHINE", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    (tmp_path / "own.yaml").write_text(json.dumps(file))
    options = ["--use_deepspeed", "--gradient_accumulation_steps", "2", "--deepspeed_config_file", "ds.json"]
    given = options if way == "an option" else ["--config_file", "own.yaml"]
    told = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    assert program_of(["accelerate", "launch", *given, "train.py"]).environment == told
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto"}))
    left = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"} if way == "an option" else {}
    found = program_of(["accelerate", "launch", *given, "train.py"]).environment
    assert {name: value for name, value in found.items() if value != "no"} == left
    (tmp_path / "ds.json").unlink()
    with pytest.raises(UsageError, match=r"The DeepSpeed configuration ds\.json cannot be read; give a JSON file"):
        program_of(["accelerate", "launch", *given, "train.py"])


@pytest.mark.parametrize(
    "command",
    [
        "-m mine.train --x",
        "python3 -m mine.train --x",
        "torchrun --nproc_per_node 2 -m mine.train --x",
        "accelerate launch --module mine.train --x",
        "deepspeed --no_local_rank --module mine.train --x",
    ],
)
def test_a_module_is_found_behind_every_launcher(command: str, here: Path) -> None:
    program = program_of(command.split())
    assert program == Program("mine.train", True, ("--x",))
    assert program.file == here / "mine" / "train.py"


def test_a_package_is_run_by_its_main_module(here: Path) -> None:
    assert program_of(["-m", "mine"]).file == here / "mine" / "__main__.py"


def test_a_command_of_trl_is_its_script() -> None:
    pytest.importorskip("trl")
    program = program_of(["trl", "sft", "--x"])
    assert program == Program("trl.scripts.sft", True, ("--x",))
    assert program.file.name == "sft.py"


@pytest.mark.parametrize("name", ["llamafactory-cli", "lmf", "/usr/bin/llamafactory-cli"])
def test_llama_factory_s_training_is_what_its_command_would_have_torchrun_start(name: str, here: Path) -> None:
    (here / "llamafactory").mkdir()
    for file in ("__init__", "launcher"):
        (here / "llamafactory" / f"{file}.py").touch()
    program = program_of([name, "train", "x.yaml"])
    assert program == Program("llamafactory.launcher", True, ("x.yaml",))
    assert program.file == here / "llamafactory" / "launcher.py"


def test_an_installed_program_in_python_is_run_itself(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "bin").mkdir()
    program = here / "bin" / "tune-it"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    assert program_of(["tune-it", "train", "x.yaml"]) == Program(str(program), False, ("train", "x.yaml"))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], "No script was named after --"),
        (["python"], "No script was named after --"),
        (["none.py"], "There is no script none.py here; give its path"),
        (["torchrun", "none.py"], "There is no script none.py here; give its path"),
        (["no-such-program"], "no-such-program is neither a Python file nor an installed program"),
        ([str(MISBEHAVING / "bash_script.sh")], "bash_script.sh is not a Python program, and only the Python process"),
        (["bash", "train.sh"], "bash is not a Python program"),
        (["torchrun", "--no-such", "train.py"], "torchrun does not understand the command: unrecognized arguments"),
        (["accelerate", "launch", "--no-such", "train.py"], "accelerate launch does not understand the command: "),
        (["deepspeed"], "deepspeed does not understand the command: the following arguments are required"),
        (["\x1b[31m.py"], r"There is no script \x1b[31m.py here"),
    ],
)
def test_what_is_no_python_program_is_refused_in_one_sentence(command: list[str], words: str, here: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        program_of(command)


def test_a_module_that_is_not_there_is_refused(here: Path) -> None:
    for name in ("mine.none", "no_such_package.train", "no_such_package"):
        with pytest.raises(UsageError, match=f"There is no module {name} in this environment"):
            _ = program_of(["-m", name]).file


@pytest.mark.parametrize(
    ("command", "trains"),
    [
        (["python", "trainer.py"], True),
        ("python trainer.py --x 1", True),
        (b"torchrun trainer.py", True),
        (["accelerate", "launch", "trainer.py"], True),
        (["python", "download.py"], False),
        (["python", "-c", "from transformers import Trainer"], False),
        (["git", "rev-parse", "HEAD"], False),
        (["python", "none.py"], False),
        ("echo 'unclosed", False),
        ([], False),
    ],
)
def test_only_a_python_program_with_a_word_of_training_may_train(command: Any, trains: bool, here: Path) -> None:
    (here / "trainer.py").write_text("from transformers import Trainer\n")
    (here / "download.py").write_text("import huggingface_hub\n")
    assert may_train(words_of(command)) == trains


def test_modules_of_libraries_are_known_in_an_environment_on_top_of_another_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, name in (("cluster/site-packages", "of_the_cluster"), ("home", "of_the_user")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{name}.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    before = frozenset(sys.modules)
    for name in ("of_the_cluster", "of_the_user"):
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    assert installed_since(before) == ("of_the_cluster",)


# Samples

LENGTHS = [3, 9, 5, 1, 7, 4, 8, 2]


class Texts(Dataset[dict[str, list[int]]]):
    """Texts of so many tokens."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": list(range(1, self.lengths[index] + 1))}


class Stream(IterableDataset[dict[str, list[int]]]):
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return ({"input_ids": list(range(1, length + 1))} for length in self.lengths)


def padded(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    rows = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def arrow(lengths: list[int]) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"input_ids": [list(range(1, length + 1)) for length in lengths]})


@pytest.fixture(params=[Texts, arrow, Stream])
def samples(request: pytest.FixtureRequest) -> Samples:
    return Samples(DataLoader(request.param(LENGTHS), batch_size=2, collate_fn=padded))


def test_the_longest_samples_are_found_whatever_holds_them(samples: Samples) -> None:
    assert list(samples.sizes.values()) == LENGTHS
    assert (samples.longest(3)["attention_mask"]).sum(1).tolist() == [9, 8, 7]
    assert shape_of(samples.longest(1)) == (1, 9)


def test_a_batch_of_more_than_there_are_repeats_the_longest(samples: Samples) -> None:
    assert samples.longest(10)["attention_mask"].sum(1).tolist() == [9, 8, 7, 5, 4, 3, 2, 1, 9, 8]


def test_a_usual_batch_is_as_long_as_batches_are_on_average(samples: Samples) -> None:
    # Of (3, 9), (5, 1), (7, 4) and (8, 2) the longest are 7.25 and the tokens are 9.75 on average.
    assert samples.usual(2)["attention_mask"].sum(1).tolist() == [8, 2]
    assert samples.usual(10)["input_ids"].shape[0] == 10


def test_batches_of_new_lengths_are_the_most_usual_of_all_other_lengths(samples: Samples) -> None:
    assert samples.usual(2)["input_ids"].shape == (2, 8)
    assert [samples.batch(2, "new")["input_ids"].shape[1] for _ in range(4)] == [7, 9, 5, 7]
    assert samples.share_of_new_lengths(2) == 1.0
    assert samples.share_of_new_lengths(4) == 1.0


def padded_to_four(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    batch = padded(samples)
    missing = -batch["input_ids"].shape[1] % 4
    return {name: torch.nn.functional.pad(each, (0, missing)) for name, each in batch.items()}


def packed(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[token for sample in samples for token in sample["input_ids"]]])}


@pytest.mark.parametrize(
    ("lengths", "collate", "share"),
    [
        ([5, 5, 5, 6, 7, 7, 5, 5], padded, 3 / 8),
        ([5, 1, 8, 9, 10, 7, 2, 6], padded_to_four, 3 / 8),
        ([5] * 8, padded, 0.0),
        ([1, 2, 3, 4, 5, 6, 7, 8], lambda samples: {"labels": torch.ones(len(samples))}, 0.0),
    ],
    ids=["three of eight", "three multiples of four", "one length", "no tokens"],
)
def test_an_epoch_meets_each_length_once(lengths: list[int], collate: Any, share: float) -> None:
    samples = Samples(DataLoader(Texts(lengths), batch_size=1, collate_fn=collate))
    assert samples.share_of_new_lengths(1) == share


class Captioned(Texts):
    """Texts with a picture each."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "pixel_values": torch.ones(3, 2, 2)}


def test_pictures_are_not_collated_to_tell_lengths_apart() -> None:
    collated: list[int] = []

    def noted(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        collated.append(len(samples))
        return padded(samples)

    samples = Samples(DataLoader(Captioned(LENGTHS), batch_size=2, collate_fn=noted))
    collated.clear()
    assert samples.share_of_new_lengths(2) == 0.0
    assert collated == []


def test_packed_batches_are_as_long_as_their_samples_together() -> None:
    samples = Samples(DataLoader(Texts([5, 2, 4, 3, 6, 2, 1, 1]), batch_size=2, collate_fn=packed))
    assert samples.share_of_new_lengths(2) == 3 / 4


def test_the_mean_is_of_tokens_without_padding(samples: Samples) -> None:
    assert samples.mean_tokens() == pytest.approx(sum(LENGTHS) / len(LENGTHS))


def test_samples_are_alike_where_all_are_padded_to_one_length(samples: Samples) -> None:
    assert not samples.are_alike
    assert Samples(DataLoader(Texts([7] * 8), batch_size=2, collate_fn=padded)).are_alike


def test_a_stream_has_no_number_of_samples() -> None:
    assert Samples(DataLoader(Stream(LENGTHS), batch_size=2, collate_fn=padded)).total is None
    assert Samples(DataLoader(Texts(LENGTHS), batch_size=2, collate_fn=padded)).total == len(LENGTHS)


def test_batches_come_in_the_sampler_s_own_order() -> None:
    backwards = DataLoader(Texts(LENGTHS), batch_size=2, sampler=list(range(7, -1, -1)), collate_fn=padded)
    assert Samples(backwards).usual(2)["attention_mask"].sum(1).tolist() == [2, 8]


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoader(Texts([1]), batch_size=None), "gives whole batches"),
        (lambda: DataLoader(Stream([1]), batch_size=None), "gives whole batches"),
        (lambda: DataLoader(Stream([]), batch_size=2), "its data set is empty"),
    ],
)
def test_a_loader_whose_batches_cannot_be_made_anew_is_refused(loader: Any, words: str) -> None:
    with pytest.raises(WholeBatchesError, match=words):
        Samples(loader())


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (padded([{"input_ids": [1, 2, 3]}, {"input_ids": [1]}]), (4, 6)),
        ({"input_ids": torch.ones(2, 5)}, (10, 10)),
        (
            {
                "chosen_input_ids": torch.ones(1, 4),
                "chosen_attention_mask": torch.tensor([[1, 1, 1, 0]]),
                "rejected_input_ids": torch.ones(1, 2),
                "rejected_attention_mask": torch.tensor([[1, 1]]),
            },
            (5, 6),
        ),
        ([torch.ones(2, 5), torch.ones(2)], (10, 10)),
        ({"labels": torch.ones(2)}, (0, 0)),
    ],
)
def test_tokens_are_counted_without_padding_and_with_it(batch: Any, tokens: tuple[int, int]) -> None:
    assert count_tokens(batch) == tokens


def test_a_batch_s_shape_is_its_sequences_and_its_longest() -> None:
    assert shape_of({"input_ids": torch.ones(3, 7), "labels": torch.ones(3, 9)}) == (3, 7)
    assert shape_of({"chosen_input_ids": torch.ones(1, 4), "rejected_input_ids": torch.ones(1, 6)}) == (2, 6)
    for batch in ({"pixel_values": torch.ones(1, 3, 8, 8)}, [torch.ones(2, 5)], {"input_ids": torch.ones(5)}):
        with pytest.raises(WholeBatchesError, match="no input_ids of two dimensions"):
            shape_of(batch)


def test_another_micro_batch_changes_nothing_else_of_a_loader() -> None:
    order = [7, 0, 6, 1, 5, 2, 4]
    loader = DataLoader(Texts(LENGTHS), batch_size=2, sampler=order, collate_fn=padded, drop_last=True)
    again = rebatched(loader, 3)
    assert (again.batch_size, again.drop_last, again.dataset) == (3, True, loader.dataset)
    lengths = [batch["attention_mask"].sum(1).tolist() for batch in again]
    assert lengths == [[LENGTHS[index] for index in order[start : start + 3]] for start in (0, 3)]
    stream = rebatched(DataLoader(Stream(LENGTHS), batch_size=2, collate_fn=padded), 4)
    assert [batch["attention_mask"].sum(1).tolist() for batch in stream] == [LENGTHS[:4], LENGTHS[4:]]


def test_a_loader_that_decides_on_its_batches_cannot_get_another_micro_batch() -> None:
    batches = DataLoader(Texts(LENGTHS), batch_sampler=[[0, 1, 2], [3]], collate_fn=padded)
    with pytest.raises(WholeBatchesError, match="decides on its batches itself"):
        rebatched(batches, 2)
