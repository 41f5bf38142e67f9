"""ladder.yaml: defaults that count, that a typed option beats, and of which none is silently ignored."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from ladder.cli.command_help import PanelledCommand
from ladder.cli.declared import takes
from ladder.cli.defaults import read_defaults, schema
from ladder.cli.main import main
from ladder.errors import UsageError
from ladder.options.declaring import Option, Switches, checked, checked_values
from ladder.options.kinds import whole
from ladder.options.tune import BEYOND, SEARCH, WorkloadOptions


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


def test_what_the_file_sets_is_said_first_but_for_what_is_typed(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "ladder.yaml").write_text("plan: {gpus: 4, gpu-memory: 40GiB}\n")
    for typed, said in (((), "--gpu-memory 40GiB, --gpus 4"), (("--gpus=2",), "--gpu-memory 40GiB")):
        assert main(["plan", "llama-2-7b", "--format", "json", *typed]) == 0
        assert capsys.readouterr().err.splitlines()[0] == f"ladder.yaml sets {said} for ladder plan."
    assert main(["plan", "llama-2-7b", "--gpus", "2", "--gpu-memory", "8GiB"]) == 0
    assert "ladder.yaml" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tune: {gpu: 4}", "no option gpu; did you mean gpus?"),
        ("tuna: {gpus: 4}", "no command tuna; did you mean tune?"),
        ("tune: {gpu-memory: lots}", "'lots' is not a size"),
        ("tune: 4", "must be a mapping"),
        ("[1, 2]", "must be a mapping"),
        ("tune: {", "is not YAML"),
        ("[" * 5000, "is nested too deeply"),
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


# An option is declared once: made-up ones, a field more each, are everywhere where an option has to be.


def registered() -> dict[str, Option]:
    return {"big-pages": Option("Try big pages too.", BEYOND), "small-talk": Option("Try small talk too.", BEYOND)}


@dataclass(frozen=True, kw_only=True)
class MadeUp(WorkloadOptions):
    patience: Annotated[
        int | None, Option("How long to be patient, in hours.", SEARCH, whole(1, 9), unset="until noon")
    ] = None
    tricks: Annotated[Mapping[str, bool], Switches(registered)] = field(default_factory=dict)


def app_of(options: type) -> tuple[typer.Typer, list[Any]]:
    """An application whose command `try` takes `options`, and what it was called with."""
    seen: list[Any] = []
    app = typer.Typer(rich_markup_mode="rich")
    app.callback()(lambda: None)

    @takes(options)
    def command(given: Any) -> int:
        """Try it.

        Examples:

          ladder try it
        """
        seen.append(given)
        return 0

    app.command("try", cls=PanelledCommand)(command)
    return app, seen


def test_it_can_be_typed_and_stands_whole_in_its_panel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app, seen = app_of(MadeUp)
    app(["try", "tiny-llama", "--patience", "3", "--no-big-pages"], standalone_mode=False)
    assert seen == [MadeUp(model="tiny-llama", patience=3, tricks={"big-pages": False})]
    monkeypatch.setenv("COLUMNS", "80")
    app(["try", "--help"], standalone_mode=False)
    search = capsys.readouterr().out.partition("─ Search ─")[2].partition("╰")[0]
    assert "--patience N" in search
    assert "[default: until noon]" in " ".join(search.replace("│", " ").split())
    with pytest.raises(Exception, match="9"):
        app(["try", "tiny-llama", "--patience", "10"], standalone_mode=False)


def test_its_values_are_checked_for_python_callers() -> None:
    assert checked(MadeUp(model="a", patience=9)).patience == 9
    with pytest.raises(UsageError, match="--patience: 10 is not valid; give a whole number from 1 to 9"):
        checked(MadeUp(model="a", patience=10))
    with pytest.raises(UsageError, match="--big-pages: 1 is not valid; give True or False"):
        checked_values(MadeUp, {"big_pages": 1})


def test_it_may_have_a_default_in_ladder_yaml_and_is_in_its_schema(tmp_path: Path) -> None:
    app, seen = app_of(MadeUp)
    file = tmp_path / "ladder.yaml"
    file.write_text("try: {patience: 4, big-pages: true}")
    defaults = read_defaults(app, file)
    app(["try", "a", "--no-big-pages"], standalone_mode=False, default_map=defaults)
    assert seen == [MadeUp(model="a", patience=4, tricks={"big-pages": False})]
    properties = schema(app)["properties"]["try"]["properties"]
    assert (properties["patience"]["type"], properties["patience"]["maximum"]) == ("integer", 9)
    assert properties["big-pages"]["type"] == "boolean"


@pytest.mark.parametrize(
    "command", ["tune", "plan", "verify", "doctor", "export", "report", "explain", "models", "machines", "schema", ""]
)
def test_no_help_cuts_anything_off_at_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = {}
    for columns in (80, 400):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main([*command.split(), "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= columns
        printed[columns] = re.findall(r"[^\s│╭╮╰╯─]+", "\n".join(lines))
    assert printed[80] == printed[400]
