"""Declared options on the command line: turns dataclasses of options into parameters for typer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from ladder.options.declaring import Declared, Option, declared, gathered


def takes(*dataclasses: type) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Turns a function that takes one instance of each of `dataclasses` into a command with all their options.

    They are known as its attribute `declared` (`declared_by`).
    Only the types of values are checked here; `declaring.checked` checks the rest, for Python callers too.
    """
    known = [declared(each) for each in dataclasses]

    def command_of(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def command(**typed: Any) -> int:
            return function(
                *(
                    gathered(each, {name: _value(option, typed[name]) for name, option in options.items()})
                    for each, options in zip(dataclasses, known, strict=True)
                )
            )

        parameters = [_parameter(option) for options in known for option in options.values()]
        command.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        command.declared = [option for options in known for option in options.values()]  # type: ignore[attr-defined]
        return command

    return command_of


def _value(option: Declared, typed: Any) -> Any:
    return tuple(typed or ()) if option.several else typed


def _parameter(option: Declared) -> inspect.Parameter:
    """`option` as a parameter for typer, with a type, a default and an annotation."""
    kind = option.kind
    typed = list[kind.typed] if option.several else kind.typed  # type: ignore[name-defined]
    if option.several or option.may_be_none:
        typed = typed | None
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if option.is_required else None if option.several else option.default,
        annotation=Annotated[typed, _argument(option) if option.option.is_argument else _option(option)],
    )


def declared_by(app: typer.Typer) -> dict[str, list[Declared]]:
    """The options and arguments of each command."""
    commands = {str(each.name): each.callback for each in app.registered_commands}
    return {name: getattr(callback, "declared", []) for name, callback in commands.items()}


def help_of(option: Option) -> str:
    """With what happens if it is left out."""
    return f"{option.help} [default: {option.unset}]" if option.unset else option.help


def _argument(option: Declared) -> Any:
    return typer.Argument(
        metavar=option.flag,
        help=help_of(option.option),
        show_default=not option.option.unset,
        rich_help_panel=option.option.panel,
        autocompletion=_completion(option.option.names),
    )


def _option(option: Declared) -> Any:
    is_switch, kind = option.kind.typed is bool, option.kind
    names = [f"{option.flag}/--no-{option.flag.removeprefix('--')}" if is_switch else option.flag]
    names += [option.option.short] if option.option.short else []
    return typer.Option(
        *names,
        metavar=None if is_switch else option.option.metavar or kind.metavar,
        min=kind.least,
        max=kind.most,
        parser=_parser(kind.parse) if kind.parse is not None else None,
        help=help_of(option.option),
        show_default=not is_switch and not option.option.unset,
        rich_help_panel=option.option.panel,
        autocompletion=_completion(option.option.names),
    )


def _completion(names: Callable[[], Iterable[str]] | None) -> Callable[[str], list[str]] | None:
    """The function that shell completion calls with the text so far; None leaves completion to the type."""
    if names is None:
        return None

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete.lower())]

    return complete


def _parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return read
