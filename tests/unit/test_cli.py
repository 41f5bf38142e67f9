"""The command line: exit codes, one sentence an error, and nothing heavy loaded for its help."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from ladder.cli import main as cli
from ladder.cli.main import main
from ladder.errors import (
    EXIT_FOUND,
    EnvironmentFaultError,
    LadderError,
    ModelNotAccessibleError,
    NothingFitsError,
    UsageError,
)
from ladder.options.answer import RunOptions, VerifyOptions
from ladder.options.declaring import declared
from ladder.options.plan import PlanOptions
from ladder.options.tune import TuneOptions

ROOT = Path(__file__).parents[2]
HELP = re.compile(r'help="([^"]*)"')
OPTIONS = [
    each for options in (TuneOptions, PlanOptions, VerifyOptions, RunOptions) for each in declared(options).values()
]
COMMANDS = (
    "tune", "plan", "scale", "sbatch", "run", "explain", "report", "verify", "export", "doctor", "schema", "models",
    "machines", "runs",
)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "none.json"], "'none.json' does not exist"),
        (["verify", "none.json"], "'none.json' does not exist"),
        (["tune", "tiny-llama", "--no-such-option"], "--no-such-option"),
        (["tune", "tiny-llama", "--gpus", "many"], "--gpus"),
        (["tune", "tiny-llama", "--gpu-memory", "lots"], "'lots' is not a size"),
        (["tune", "tiny-llama", "--time-budget", "soon"], "'soon' is not a duration"),
        (["tune", "tiny-llama", "--time-budget", "0m"], "above zero"),
        (["tune", "tiny-llama", "--seq-len", "1"], "--seq-len"),
        (["tune", "tiny-llama", "--dtype", "fp8"], "fp8"),
        (["tune", "tiny-llama", "--rung", "zero9"], "--rung zero9 is unknown"),
        (["tune", "tiny-llama", "--gradient-clipping", "inf"], "--gradient-clipping: inf is not valid"),
        (["explain", "--why", "zero9"], "--why zero9 is unknown"),
        (["export", "--for", "nothing"], "'--for': 'nothing' is not one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_command_that_is_not_understood_is_a_usage_error_in_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("ladder: ")
    assert words in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("1.5m", 90), ("0.5h", 1800)])
def test_a_duration_is_read_with_its_unit(text: str, seconds: float) -> None:
    from ladder.options.kinds import duration

    assert duration(text) == seconds


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("it contradicts itself"), 2),
        (NothingFitsError("nothing fits"), 3),
        (EnvironmentFaultError("the GPU is full"), 4),
        (ModelNotAccessibleError("no such model"), 5),
    ],
)
def test_every_expected_error_is_one_sentence_and_its_own_status(
    error: LadderError, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_that_raises(error, monkeypatch) == status
    assert capsys.readouterr().err == f"ladder: {error}\n"


def test_anything_else_is_a_bug_and_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_that_raises(ZeroDivisionError("in the depths"), monkeypatch) == 1
    printed = capsys.readouterr().err
    assert "ZeroDivisionError: in the depths" in printed
    assert printed.rstrip().endswith("this is a bug in ladder; please report it with the lines above.")


def main_that_raises(error: Exception, monkeypatch: pytest.MonkeyPatch) -> int:
    def app(**arguments: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    return main(["tune", "tiny-llama"])


@pytest.mark.parametrize("place", ["read_defaults", "app"])
def test_ctrl_c_before_a_command_heeds_it_ends_ladder_without_a_word(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, place, interrupted)
    assert main(["tune", "tiny-llama"]) == 130
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")


@pytest.mark.parametrize(("returned", "status"), [(130, 130), (None, 0)])
def test_what_a_command_returns_is_the_exit_status(
    returned: int | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "app", lambda **arguments: returned)
    assert main([]) == status


def test_every_exit_status_is_in_the_documents() -> None:
    statuses = {error.exit_code for error in LadderError.__subclasses__()} | {LadderError.exit_code, EXIT_FOUND}
    statuses |= {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)}
    table = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs/reference/exit-codes.md").read_text(), re.MULTILINE)
    assert {int(number) for row in table for number in row.split(",")} == statuses


def test_every_help_has_examples_and_every_square_bracket_of_the_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    printed = ""
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        own = capsys.readouterr().out
        assert f"ladder {command}" in own.partition("Examples:")[2]
        printed += own
    texts = [text for path in (ROOT / "ladder" / "cli").glob("*.py") for text in HELP.findall(path.read_text())]
    written = [part for text in texts for part in re.findall(r"\[[^\]]+\]", text)]
    written += [f"[default: {each.option.unset}]" for each in OPTIONS if each.option.unset]
    assert len([part for part in written if part.startswith("[default: ")]) >= 10
    assert [part for part in written if part not in printed] == []


def test_a_bare_ladder_prints_its_help_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr()
    assert "Usage: " in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune", "tiny-llama", "--rung", "zero9"],
        ["tune", "tiny-llama", "--gpus", "-1"],
        ["verify", "none.json"],
        ["verify", "--steps", "1", "--minutes", "1"],
    ],
    ids=" ".join,
)
def test_whoever_asks_for_json_gets_a_document_for_every_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--format", "json"]) == 2
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["exit_code"] == 2
    assert printed.err == f"ladder: {document['error']}\n"


def test_no_command_is_left_out_of_these_tests() -> None:
    assert {command.name for command in cli.app.registered_commands} == set(COMMANDS)


def test_the_version_names_what_decides_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"ladder", "torch", "deepspeed", "transformers", "accelerate"} <= set(names)


@pytest.mark.parametrize(
    ("command", "known", "words"),
    [("models", "tiny-llama", "20.5 million"), ("machines", "a100-80", "8 × NVIDIA A100")],
)
def test_what_is_bundled_is_listed_as_a_table_and_as_json(
    command: str, known: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == [known]]
    assert words in line
    assert main([command, "--format", "json"]) == 0
    assert known in [row["name"] for row in json.loads(capsys.readouterr().out)]


@pytest.mark.parametrize("option", [("--nodes", "2"), ("--hostfile", "hosts"), ("--launcher", "ray")])
def test_doctor_asks_for_measure_beside_the_nodes_to_measure(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *option]) == 2
    assert "add --measure" in capsys.readouterr().err


def test_hosts_that_cannot_be_used_end_a_tune_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("a slots=1\n")
    assert main(["tune", "tiny-llama", "--gpus", "0", "--hostfile", "hosts", "--nodes", "2"]) == 4
    assert "--nodes 2 asks for more than the 1 hosts" in capsys.readouterr().err
