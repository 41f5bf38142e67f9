"""Declared options for Python callers: in the signature of a function, and in messages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from ladder.errors import LadderError
from ladder.options.declaring import Declared, declared
from ladder.options.kinds import DURATION, SIZE
from ladder.techniques.registry import TECHNIQUES

F = TypeVar("F", bound=Callable[..., Any])
_COMMAND = re.compile(r"(`(?:ladder|pip) [^`]*`)")
_MENTION = re.compile(
    r"(?<![\w-])--(?P<no>no-)?(?P<name>[a-z][a-z-]*)(?P<colon>:)?(?: (?P<value>[\w./+~-]*[\w/]( GiB| MiB)?))?"
)


def with_options(options: type) -> Callable[[F], F]:
    """Adds the options that the dataclass declares to the signature of a function that takes them as `**options`."""

    def shown(function: F) -> F:
        given = inspect.signature(function)
        own = [each for each in given.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        names = {each.name for each in own}
        more = [
            _parameter(each) for name, each in declared(options).items() if name not in names and not _is_model(each)
        ]
        keywords = [each for each in own if each.kind is inspect.Parameter.KEYWORD_ONLY]
        positional = [each for each in own if each not in keywords]
        signature = given.replace(parameters=[*positional, *more, *keywords])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return shown


def taken(each: Declared) -> Any:
    """The type of the option's values in Python."""
    kind: Any = each.kind.typed
    if each.kind is SIZE or each.kind is DURATION or kind is Path:
        kind = kind | str
    if each.several:
        kind = kind | Sequence[kind]
    return kind | None if each.may_be_none else kind


@contextmanager
def python_words(options: type) -> Iterator[None]:
    """Errors raised in the block name options as they are written in Python."""
    try:
        yield
    except LadderError as error:
        error.args = (in_python_words(str(error), options),)
        raise


def in_python_words(sentence: str, options: type) -> str:
    """`sentence` with `time_budget=…` instead of `--time-budget`; commands in backticks are not changed."""
    by_flag = {each.flag: each for each in declared(options).values()}
    parts = _COMMAND.split(sentence)
    return "".join(part if index % 2 else _translated(part, by_flag) for index, part in enumerate(parts))


def _translated(text: str, by_flag: Mapping[str, Declared]) -> str:
    def said(match: re.Match[str]) -> str:
        each = by_flag.get(f"--{match['name']}")
        if each is None:
            return match[0]
        value = match["value"] or ""
        if match["colon"]:
            return match[0].replace(f"--{match['no'] or ''}{match['name']}", each.name, 1)
        if each.kind.typed is bool:
            return f"{each.name}={not match['no']}" + (f" {value}" if value else "")
        written = _as_python(each, value)
        return f"{each.name}={written}" if written else f"{each.name}=…" + (f" {value}" if value else "")

    return _MENTION.sub(said, text)


def _as_python(each: Declared, value: str) -> str:
    """The value in Python's syntax; empty if `value` is just the next word of the sentence."""
    kind = each.kind
    if get_origin(kind.typed) is Literal:
        return f'"{value}"' if value in get_args(kind.typed) else ""
    if kind.typed in (int, float):
        if not value[:1].isdigit():
            return ""
        return f'"{value.replace(" ", "")}"' if not value.replace(".", "", 1).isdigit() else value
    return f'"{value}"' if value in TECHNIQUES or re.search(r"[\d./-]", value) else ""


def _parameter(each: Declared) -> inspect.Parameter:
    default = () if each.several else each.default
    return inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=taken(each))


def _is_model(each: Declared) -> bool:
    return each.option.is_argument
