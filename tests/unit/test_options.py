"""An option is declared once: made-up ones, a field more each, are everywhere where an option has to be."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import pytest
import typer

from ladder.cli.command_help import PanelledCommand
from ladder.cli.declared import takes
from ladder.cli.defaults import read_defaults, schema
from ladder.cli.main import app as ladder_app
from ladder.cli.main import main
from ladder.cli.reference import reference
from ladder.errors import UsageError
from ladder.search.policy import STRATEGIES
from ladder.tuning.declaring import Option, Switches, checked, checked_values, declared, gathered, spread
from ladder.tuning.option_kinds import whole
from ladder.tuning.options import BEYOND, SEARCH, StrategyName, TuneOptions, WorkloadOptions


class Switch(NamedTuple):
    """What a module would contribute."""

    name: str
    help: str
    panel: str = BEYOND


def registered() -> list[Switch]:
    return [Switch("big-pages", "Try big pages too."), Switch("small-talk", "Try small talk too.")]


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


def test_it_is_in_the_reference() -> None:
    text = reference(app_of(MadeUp)[0])
    assert "| `--patience` | `N`, at least 1, at most 9 | until noon | How long to be patient, in" in text
    assert "| `MODEL` | `MODEL` |  | A Hub id" in text
    assert "| `--big-pages` | a switch |  | Try big pages too. |" in text


def test_contributed_switches_land_in_one_mapping_and_come_out_again() -> None:
    said = gathered(MadeUp, {"model": "a", "big_pages": True, "small_talk": None})
    assert said.tricks == {"big-pages": True}
    assert gathered(MadeUp, spread(said)) == said


def test_a_type_that_does_not_say_what_an_option_takes_needs_a_kind() -> None:
    @dataclass
    class Vague:
        size: int = 0

    Vague.__annotations__["size"] = Annotated[int, Option("Of something.")]
    with pytest.raises(TypeError, match="does not say which values"):
        declared(Vague)


def test_every_strategy_can_be_asked_for() -> None:
    assert get_args(StrategyName) == tuple(STRATEGIES)


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


def test_a_default_in_the_reference_is_what_is_typed() -> None:
    text = reference(ladder_app)
    assert "| `--format` | `html`, `markdown`, `csv` | `html` |" in text
    assert re.findall(r"`\w*Format\.\w+`", text) == []


def test_an_option_for_a_path_says_so_in_the_reference() -> None:
    text = reference(ladder_app)
    assert "| `RUNS` | `PATH` |" in text
    assert "| `--model` | `TEXT` |" in text


def test_the_reference_has_every_option_of_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    text = reference(ladder_app)
    assert main(["schema"]) == 0
    commands = json.loads(capsys.readouterr().out)["properties"]
    for command, body in commands.items():
        section = text.partition(f"## ladder {command}\n")[2].partition("\n## ")[0]
        assert sorted(re.findall(r"^\| `--(\S+)`", section, re.MULTILINE)) == sorted(body["properties"])
    assert {each.flag for each in declared(TuneOptions).values() if not each.option.is_argument} <= set(
        re.findall(r"`(--\S+)`", text)
    )
