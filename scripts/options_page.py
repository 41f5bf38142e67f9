"""The reference of all commands and options as Markdown, generated from the command line itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import typer

from ladder.cli.defaults import Parameter, arguments_of, commands_of, options_of, schema_of_value, takes_several

_UNSET = re.compile(r"^(.*?)(?: \[default: (.*)\])?$", re.DOTALL)
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
    for name, callback in commands_of(app).items():
        about = inspect.cleandoc(callback.__doc__ or "").partition("\n\nExamples:")[0]
        sections.append(f"## ladder {name}\n\n{about}")
        panels: dict[str, list[str]] = {}
        shared = []
        for title, option, row in _rows(app, name):
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


def _rows(app: typer.Typer, name: str) -> Iterator[tuple[str, str, str]]:
    """For each argument and option of a command: its panel, its name and its row."""
    for argument, parameter in arguments_of(app, name):
        yield parameter.info.rich_help_panel or "Arguments", argument, _row(argument, parameter)
    for option, parameter in options_of(app, name):
        yield parameter.info.rich_help_panel or "Options", f"--{option}", _row(f"--{option}", parameter)


def _table(title: str, rows: list[str]) -> str:
    head = f"| {' | '.join(_TITLES)} |\n|{' --- |' * len(_TITLES)}"
    return "\n".join([f"### {title}\n", head, *rows])


def _row(option: str, parameter: Parameter) -> str:
    matched = _UNSET.match(parameter.info.help or "")
    meaning, unset = matched.groups() if matched else ("", None)
    default = unset or _shown(parameter.default)
    is_renamed = takes_several(parameter) and option != "--" + parameter.name and option.startswith("--")
    name = f"`{option}`" + (f", in Python `{parameter.name}`" if is_renamed else "")
    cells = (name, ", ".join(_values(parameter)), default, meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _shown(default: Any) -> str:
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default}`" if isinstance(default, str | int | float | Path) and default != "" else ""


def _values(parameter: Parameter) -> Iterator[str]:
    """The values that it takes: names, or a placeholder and its bounds."""
    schema = schema_of_value(parameter)
    if "enum" in schema:
        yield from (f"`{name}`" for name in schema["enum"])
    elif schema["type"] == "boolean":
        yield "a switch"
    else:
        yield f"`{parameter.info.metavar or ('PATH' if _takes_a_path(parameter.annotation) else 'TEXT')}`"
        bounds = {"at least": schema.get("minimum"), "at most": schema.get("maximum")}
        yield from (f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)


def _takes_a_path(annotation: Any) -> bool:
    """Whether `annotation` is a path, or has one inside, such as `list[Path] | None`."""
    return annotation is Path or any(_takes_a_path(inside) for inside in get_args(annotation))
