"""ladder.yaml: defaults that count, that a typed option beats, and of which none is silently ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
import yaml

from ladder.cli.main import app, main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["plan", "llama-2-7b", "--format", "json", *arguments]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_a_default_counts_until_the_option_is_typed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ladder.yaml").write_text("plan: {gpus: 4, gpu-memory: 40GiB, seq-len: 512}\n")
    assert planned(capsys)["gpus"] == 4
    assert planned(capsys)["seq_len"] == 512
    assert planned(capsys, "--gpus", "8")["gpus"] == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tune: {gpu: 4}", "no option gpu; did you mean gpus?"),
        ("tuna: {gpus: 4}", "no command tuna; did you mean tune?"),
        ("tune: {gpus: many}", "--gpus"),
        ("tune: {gpu-memory: lots}", "'lots' is not a size"),
        ("tune: 4", "must be a mapping"),
        ("[1, 2]", "must be a mapping"),
        ("tune: {", "is not YAML"),
    ],
)
def test_what_no_command_knows_is_refused_in_one_sentence(
    text: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ladder.yaml").write_text(text)
    assert main(["tune", "tiny-llama"]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("tune: {gpus: many}", "--gpus"),
        ("tune: {rung: zero9}", "--rung"),
        ("tune: {time-budget: soon}", "--time-budget"),
        ("tune: {wait: true}", "--wait"),
    ],
)
def test_a_wrong_value_of_the_file_is_said_to_be_the_file_s_and_one_that_was_typed_is_not(
    text: str, option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ladder.yaml").write_text(text)
    command = ["tune", "llama-2-7b", "--launcher", "simulated", "--machine", "a100-40"]
    assert main(command) == 2
    assert capsys.readouterr().err.endswith(f" (ladder.yaml sets {option}).\n")
    assert main([*command, option, *([] if option == "--wait" else ["nonsense"])]) == 2
    assert "ladder.yaml" not in capsys.readouterr().err


def test_a_document_that_the_file_asks_for_comes_for_a_refused_command_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ladder.yaml").write_text("tune: {format: json}\n")
    assert main(["tune", "llama-2-7b", "--gpus", "x"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2
    assert main(["tune", "llama-2-7b", "--gpus", "x", "--format", "text"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("command", "switch"),
    [("tune", name) for name in ("documented", "cold", "wait", "quiet", "liger")]
    + [("verify", "quiet"), ("plan", "liger"), ("doctor", "build")],
)
def test_every_switch_of_the_file_can_be_typed_off(command: str, switch: str) -> None:
    group = typer.main.get_command(app)
    with group.commands[command].make_context(  # type: ignore[attr-defined]
        command,
        [f"--no-{switch}", *(["tiny-llama"] if command in ("tune", "plan") else [])],
        default_map={switch: True},
    ) as context:
        assert context.params[switch] is False


def test_a_file_that_is_nested_without_end_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ladder.yaml").write_text("[" * 5000)
    assert main(["plan", "tiny-llama"]) == 2
    assert (
        capsys.readouterr().err
        == "ladder: ladder.yaml is nested too deeply; it may contain commands, and their options.\n"
    )


def test_an_empty_file_says_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ladder.yaml").write_text("")
    assert planned(capsys, "--gpus", "1", "--gpu-memory", "80GiB")["gpus"] == 1


def test_the_schema_knows_every_option_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    tune = schema["properties"]["tune"]
    assert tune["additionalProperties"] is False
    assert tune["properties"]["gpus"]["type"] == "integer"
    assert [way["type"] for way in tune["properties"]["rung"]["anyOf"]] == ["array", "string"]
    assert "auto" in tune["properties"]["strategy"]["enum"]
    assert tune["properties"]["wait"]["type"] == tune["properties"]["liger"]["type"] == "boolean"
    assert all(
        re.fullmatch("[a-z0-9-]+", name) for body in schema["properties"].values() for name in body["properties"]
    )
    example = yaml.safe_load("tune: {gpu-memory: 40GiB, global-batch-size: 64}")
    assert set(example["tune"]) <= set(tune["properties"])
