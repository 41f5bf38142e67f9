"""ladder.yaml: a file with defaults for the commands' options, and its JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from ladder.cli.declared import declared_by, help_of, takes
from ladder.errors import EXIT_FOUND, UsageError
from ladder.options.declaring import Declared
from ladder.text import instead_of, shown

FILE = Path("ladder.yaml")
_OPTION = re.compile(r"--[a-z][a-z-]*")
_TYPES = {bool: "boolean", int: "integer", float: "number"}


def read_defaults(app: typer.Typer, path: Path = FILE) -> dict[str, dict[str, Any]]:
    """The defaults in `path` by command and parameter, for click; empty if there is no such file.

    UsageError for an unknown command or option: a misspelt default must not be silently ignored.
    """
    try:
        written = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); correct its permissions or remove it.") from None
    import yaml  # imported here because it is slow, and most folders have no such file

    try:
        content = yaml.safe_load(written.decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply; it may contain commands, and their options.") from None
    if content is None:
        return {}
    options = {command: options_of(app, command) for command in declared_by(app)}
    defaults: dict[str, dict[str, Any]] = {}
    for command, values in _mapping(content, f"{path}").items():
        known = _known(command, options, f"{path}: there is no command")
        for name, value in _mapping(values, f"{path}: {command}").items():
            option = _known(name, known, f"{path}: ladder {command} has no option")
            is_one_of_several = option.several and value is not None and not isinstance(value, list)
            defaults.setdefault(command, {})[option.name] = _as_typed([value] if is_one_of_several else value)
    return defaults


def naming_the_file(
    app: typer.Typer, defaults: Mapping[str, Mapping[str, Any]], typed: Sequence[str], sentence: str
) -> str:
    """`sentence` of an error. If it names options that the file sets and the user did not type, it says so."""
    command = next((word for word in typed if word in defaults), None)
    if command is None:
        return sentence
    named = set(_OPTION.findall(sentence)) - {word.partition("=")[0] for word in typed}
    options = [each for each in options_of(app, command).values() if each.name in defaults[command]]
    from_file = [each.flag for each in options if each.flag in named]
    return f"{sentence.removesuffix('.')} ({FILE} sets {', '.join(from_file)})." if from_file else sentence


def schema(app: typer.Typer) -> dict[str, Any]:
    """The JSON schema of ladder.yaml."""
    commands = {
        command: {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: _property(option) for name, option in options_of(app, command).items()},
        }
        for command in declared_by(app)
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ladder.yaml: defaults for ladder's options, by command",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: body for name, body in commands.items() if body["properties"]},
    }


def schema_command(app: typer.Typer) -> Any:
    """`ladder schema` for `app`."""

    @takes()
    def print_schema() -> int:
        """Print the JSON schema of ladder.yaml, the file of defaults in the current folder.

        Examples:

          ladder schema
        """
        typer.echo(json.dumps(schema(app), indent=2))
        return EXIT_FOUND

    return print_schema


def options_of(app: typer.Typer, command: str) -> dict[str, Declared]:
    """The options of `command` by their long names without dashes."""
    return {each.flag.lstrip("-"): each for each in declared_by(app)[command] if not each.option.is_argument}


def _property(option: Declared) -> dict[str, Any]:
    found = schema_of_value(option)
    if option.several:  # a single value may be written without brackets
        found = {"anyOf": [{"type": "array", "items": found}, found]}
    return {**found, "description": help_of(option.option)}


def schema_of_value(option: Declared) -> dict[str, Any]:
    """The schema of the option's value; of one value if it takes several."""
    kind = option.kind
    if kind.parse is not None:  # a size or a duration, which needs its unit
        return {"type": "string"}
    if get_origin(kind.typed) is Literal:
        return {"enum": list(get_args(kind.typed))}
    bounds = {"minimum": kind.least, "maximum": kind.most}
    return {"type": _TYPES.get(kind.typed, "string"), **{name: at for name, at in bounds.items() if at is not None}}


def _known(name: Any, known: Mapping[str, Any], problem: str) -> Any:
    if name in known:
        return known[name]
    raise UsageError(f"{problem} {shown(name)}; {instead_of(name, known)}")


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be a mapping, such as `tune: {{gpus: 4}}`.")
    return value


def _as_typed(value: Any) -> Any:
    """`value` as it would be typed on the command line, so that it is checked in the same way."""
    if isinstance(value, list):
        return [_as_typed(each) for each in value]
    return value if isinstance(value, bool) or value is None else str(value)
