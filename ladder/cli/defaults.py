"""ladder.yaml: a file with defaults for the commands' options, and its JSON schema."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import typer
from typer.models import OptionInfo, ParameterInfo

from ladder.errors import EXIT_FOUND, UsageError
from ladder.text import instead_of, shown

FILE = Path("ladder.yaml")
_OPTION = re.compile(r"--[a-z][a-z-]*")
_TYPES = {bool: "boolean", int: "integer", float: "number"}


class Parameter(NamedTuple):
    """An option or argument of a command: its Python parameter, its type, typer's information and its default."""

    name: str
    annotation: Any
    info: ParameterInfo
    default: Any


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
    options = {command: dict(options_of(app, command)) for command in commands_of(app)}
    defaults: dict[str, dict[str, Any]] = {}
    for command, values in _mapping(content, f"{path}").items():
        known = _known(command, options, f"{path}: there is no command")
        for name, value in _mapping(values, f"{path}: {command}").items():
            parameter = _known(name, known, f"{path}: ladder {command} has no option")
            several = takes_several(parameter) and value is not None and not isinstance(value, list)
            defaults.setdefault(command, {})[parameter.name] = _as_typed([value] if several else value)
    return defaults


def naming_the_file(
    app: typer.Typer, defaults: Mapping[str, Mapping[str, Any]], typed: Sequence[str], sentence: str
) -> str:
    """`sentence` of an error. If it names options that the file sets and the user did not type, it says so."""
    command = next((word for word in typed if word in defaults), None)
    if command is None:
        return sentence
    named = set(_OPTION.findall(sentence)) - {word.partition("=")[0] for word in typed}
    options = [f"--{name}" for name, parameter in options_of(app, command) if parameter.name in defaults[command]]
    from_file = [option for option in options if option in named]
    return f"{sentence.removesuffix('.')} ({FILE} sets {', '.join(from_file)})." if from_file else sentence


def schema(app: typer.Typer) -> dict[str, Any]:
    """The JSON schema of ladder.yaml."""
    commands = {
        command: {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: _property(parameter) for name, parameter in options_of(app, command)},
        }
        for command in commands_of(app)
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

    def print_schema() -> int:
        """Print the JSON schema of ladder.yaml, the file of defaults in the current folder.

        Examples:

          ladder schema
        """
        typer.echo(json.dumps(schema(app), indent=2))
        return EXIT_FOUND

    return print_schema


def commands_of(app: typer.Typer) -> dict[str, Callable[..., Any]]:
    """The functions of all commands, by name."""
    return {str(command.name): command.callback for command in app.registered_commands if command.callback}


def options_of(app: typer.Typer, command: str) -> Iterator[tuple[str, Parameter]]:
    """The options of `command` by their long names without dashes."""
    for parameter in _parameters_of(app, command):
        if isinstance(parameter.info, OptionInfo):
            # In an annotation, typer stores the first name as the default; a switch also names its opposite.
            given = [str(each).split("/")[0] for each in (parameter.info.default, *(parameter.info.param_decls or ()))]
            names = [each for each in given if each.startswith("-")]
            longest = max(names or [f"--{parameter.name.replace('_', '-')}"], key=len)
            yield longest.lstrip("-"), parameter


def arguments_of(app: typer.Typer, command: str) -> Iterator[tuple[str, Parameter]]:
    """The positional arguments of `command`, by their placeholders in the help."""
    for parameter in _parameters_of(app, command):
        if not isinstance(parameter.info, OptionInfo):
            yield parameter.info.metavar or parameter.name.upper(), parameter


def _parameters_of(app: typer.Typer, command: str) -> Iterator[Parameter]:
    # Not typing.get_type_hints, which in Python 3.10 changes the types of parameters with the default None.
    for name, parameter in inspect.signature(commands_of(app)[command], eval_str=True).parameters.items():
        for info in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(info, ParameterInfo):
                yield Parameter(name, parameter.annotation.__origin__, info, parameter.default)


def _kind(parameter: Parameter) -> Any:
    """The type of the parameter without None."""
    if get_origin(parameter.annotation) not in (Union, UnionType):
        return parameter.annotation
    return next(kind for kind in get_args(parameter.annotation) if kind is not type(None))


def takes_several(parameter: Parameter) -> bool:
    """Whether it may be given several times."""
    return get_origin(_kind(parameter)) is list


def _property(parameter: Parameter) -> dict[str, Any]:
    found = schema_of_value(parameter)
    if takes_several(parameter):  # a single value may be written without brackets
        found = {"anyOf": [{"type": "array", "items": found}, found]}
    return {**found, "description": parameter.info.help or ""}


def schema_of_value(parameter: Parameter) -> dict[str, Any]:
    """The schema of the option's value; of one value if it takes several."""
    kind = get_args(_kind(parameter))[0] if takes_several(parameter) else _kind(parameter)
    if parameter.info.parser is not None:  # a size or a duration, which needs its unit
        return {"type": "string"}
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    bounds = {"minimum": parameter.info.min, "maximum": parameter.info.max}
    return {"type": _TYPES.get(kind, "string"), **{name: at for name, at in bounds.items() if at is not None}}


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
