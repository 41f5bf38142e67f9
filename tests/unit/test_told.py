"""Where a number stands in a script's arguments and configuration files, and what becomes of them with another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ladder.tuning.told import Place, Told

TEXT = "train:\n  size: 4\n  lr: 1e-5\n  by_length: true\nseeds: [4]\nname: '4'\n"


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return str(path)


def test_a_number_is_found_in_options_settings_and_files_of_any_spelling(file: str) -> None:
    told = Told(("--bs", "4", "--size=4", "data.size=4", "4", "--lr", "4e-5", "--config", file))
    assert told.places(4) == [Place("--bs"), Place("--size"), Place("data.size"), Place(file, ("train", "size"))]
    assert Told(("--config", file)).places(1) == [], "true is no number"


def test_each_is_changed_in_its_place_and_files_in_a_copy(file: str, tmp_path: Path) -> None:
    told = Told(("--bs", "4", "data.size=4", f"--config={file}"))
    for place in told.places(4):
        told = told.at(place, 8)
    arguments, texts = told.at(Place("--new"), 2).written(tmp_path / "out", "best")
    ((copy, text),) = texts.items()
    assert arguments == ("--bs", "8", "data.size=8", f"--config={copy}", "--new", "2")
    assert copy == tmp_path / "out" / "best.run.yaml"
    assert yaml.safe_load(text) == yaml.safe_load(TEXT.replace("size: 4", "size: 8"))
    assert Path(file).read_text() == TEXT


@pytest.mark.parametrize("text", ["- a list", "a: !unknown tag", "a: b: c", "\0"])
def test_a_file_that_is_no_mapping_is_left_to_its_program(text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    assert Told((str(tmp_path / "odd.yaml"), "missing.json")).files() == {}


def test_a_file_of_deepspeed_gives_way_unless_its_schedule_or_optimizer_would_be_lost(tmp_path: Path) -> None:
    for name, more in (("plain.json", ""), ("warms.json", ', "scheduler": {}')):
        (tmp_path / name).write_text(f'{{"zero_optimization": {{"stage": 2}}, "train_batch_size": 4{more}}}')
    plain, warms = (str(tmp_path / name) for name in ("plain.json", "warms.json"))
    told = Told(("--deepspeed", plain, "--other", warms))
    assert told.of_deepspeed() == [plain]
    assert told.places(4) == [], "what it says of batches comes from the answer"
    assert told.instead(plain, "best.json").arguments == ("--deepspeed", "best.json", "--other", warms)
