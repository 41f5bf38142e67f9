"""The reference of all commands and options as Markdown, generated from the command line itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ladder.cli.declared import declared_by
from ladder.cli.defaults import schema_of_value
from ladder.options.declaring import Declared

_TITLES = ("option", "values", "default", "meaning")
_FIRST = "tune"
"""The command with most options."""


def options_page(app: typer.Typer) -> str:
    """One section per command: what it does, and a table of options for each panel of its help.

    Options that the first command has too, with the same words, are only named in later sections.
    """
    told = set[str]()
    sections = [
        "# Commands and options\n\n"
        "You can set your own default for every option in `ladder.yaml`, under its command and without the dashes: "
        "`tune: {gpus: 4, gpu-memory: 40GiB}`. In Python, `ladder.tune`, `ladder.plan` and `ladder.verify` take the "
        "same options with underscores instead of dashes, and times in seconds: "
        '`ladder.tune("llama-2-7b", gpu_memory="40GiB", time_budget=900)`.'
    ]
    commands = {str(each.name): each.callback for each in app.registered_commands}
    for name, known in declared_by(app).items():
        about = inspect.cleandoc(commands[name].__doc__ or "").partition("\n\nExamples:")[0]
        sections.append(f"## ladder {name}\n\n{about}")
        panels: dict[str, list[str]] = {}
        shared = []
        for title, option, row in _rows(known):
            if row in told:  # word for word
                shared.append(f"`{option}`")
            else:
                panels.setdefault(title, []).append(row)
        if shared:
            sections.append(f"As for [`ladder {_FIRST}`](#ladder-{_FIRST}): {', '.join(shared)}.")
        sections += [_table(title, rows) for title, rows in panels.items()]
        if name == _FIRST:
            told = {row for rows in panels.values() for row in rows}
    return "\n\n".join(sections) + "\n"


def _rows(known: list[Declared]) -> Iterator[tuple[str, str, str]]:
    """For each argument and option of a command, arguments first: its panel, its name and its row."""
    for each in sorted(known, key=lambda each: not each.option.is_argument):
        other = "Arguments" if each.option.is_argument else "Options"
        yield each.option.panel or other, each.flag, _row(each)


def _table(title: str, rows: list[str]) -> str:
    head = f"| {' | '.join(_TITLES)} |\n|{' --- |' * len(_TITLES)}"
    return "\n".join([f"### {title}\n", head, *rows])


def _row(each: Declared) -> str:
    default = each.option.unset or _shown(each.default)
    is_renamed = each.several and each.flag != "--" + each.name and each.flag.startswith("--")
    name = f"`{each.flag}`" + (f", in Python `{each.name}`" if is_renamed else "")
    cells = (name, ", ".join(_values(each)), default, each.option.help)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default}`" if isinstance(default, str | int | float | Path) and default != "" else ""


def _values(each: Declared) -> Iterator[str]:
    """The values that it takes: names, or a placeholder and its bounds."""
    schema = schema_of_value(each)
    if "enum" in schema:
        yield from (f"`{name}`" for name in schema["enum"])
    elif schema["type"] == "boolean":
        yield "a switch"
    else:
        yield f"`{each.flag if each.option.is_argument else each.option.metavar or each.kind.metavar}`"
        bounds = {"at least": schema.get("minimum"), "at most": schema.get("maximum")}
        yield from (f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)
