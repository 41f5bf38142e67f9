"""Options are declared once, as annotated fields of a frozen dataclass.

    steps: Annotated[int | None, Option("Time this many optimizer steps.", kind=whole(1))] = None

The command line, the checks of Python arguments, `ladder.yaml` and its schema, and the reference page are all made from
that. A field that is a mapping takes switches that other modules contribute:

    techniques: Annotated[Mapping[str, bool], Switches(registered)] = field(default_factory=dict)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, TypeVar, get_type_hints

from ladder.errors import UsageError
from ladder.options.kinds import Kind, kind_of, value_type

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """What is declared about an option besides its type and its default."""

    help: str
    panel: str | None = None
    """Its heading in the help."""
    kind: Kind | None = None
    """Which values it takes, if the type alone does not say."""
    flag: str | None = None
    """Its name on the command line, if that differs from the field's name."""
    short: str | None = None
    """A one-letter name, such as `-q`."""
    metavar: str | None = None
    """The placeholder for its value in the help, if not that of its kind."""
    unset: str | None = None
    """In a few words, what happens if it is left out, if the default does not say it."""
    is_argument: bool = False
    """It is a positional argument."""
    names: Callable[[], Iterable[str]] | None = None
    """Values that a shell can complete; others may be allowed. Called only for completion."""


@dataclass(frozen=True)
class Switches:
    """Marks a field whose value maps the names of switches that other modules contribute to their values.

    A switch is on, off, or, if not given, decided by ladder. `listed` gives them by their names on the command line,
    without the dashes. It must be a named function: a lambda in an annotation cannot see the names of its module.
    """

    listed: Callable[[], Mapping[str, Option]]


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One declared option."""

    name: str
    """Its name in Python."""
    option: Option
    kind: Kind
    default: Any
    is_required: bool = False
    several: bool = False
    """It takes several values, in a tuple."""
    field: str
    """The field that holds its value."""
    key: str | None = None
    """Its key in that field, if the field is a mapping."""

    @property
    def flag(self) -> str:
        """Its name on the command line and in messages."""
        if self.option.is_argument:
            return self.name.upper()
        return self.option.flag or "--" + self.name.replace("_", "-")

    @property
    def may_be_none(self) -> bool:
        """None means that ladder chooses a default."""
        return self.default is None and not self.is_required


def declared(options: type) -> dict[str, Declared]:
    """The options that a dataclass declares, by their names in Python."""
    hints = get_type_hints(options, include_extras=True)
    found: list[Declared] = []
    for field in fields(options):
        hint = hints[field.name]
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Switches):
                found += [_contributed(name, option, field.name) for name, option in note.listed().items()]
            elif isinstance(note, Option):
                found.append(_of_field(field, hint.__origin__, note))
    return {each.name: each for each in found}


def gathered(options: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass made from `values` by option; other options have their defaults."""
    known, given = declared(options), dict[str, Any]()
    for name, value in values.items():
        each = known[name]
        if each.key is None:
            given[each.field] = value
        elif value is not None:
            given[each.field] = {**given.get(each.field, {}), each.key: value}
    return options(**given)


def spread(options: Any) -> dict[str, Any]:
    """The reverse of `gathered`: the values by option."""
    return {
        name: getattr(options, each.field) if each.key is None else getattr(options, each.field).get(each.key)
        for name, each in declared(type(options)).items()
    }


def checked_values(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` by option, as Python callers write them, converted to the options' own types.

    A size may be a string with its unit, a path a string, and a single value may stand for a sequence of one. None is
    allowed for options whose default ladder chooses. UsageError, in one sentence, for an invalid value: otherwise it
    would cause an error after hours of trials.
    """
    known = declared(options)
    return {name: _checked(known[name], value) for name, value in values.items()}


def checked(options: T) -> T:
    """`options` with every value converted to its type. UsageError, in one sentence, for an invalid one."""
    return gathered(type(options), checked_values(type(options), spread(options)))


def _checked(each: Declared, value: Any) -> Any:
    if value is None and each.may_be_none:
        return None
    try:
        if not each.several:
            return each.kind.read(value)
        is_sequence = isinstance(value, list | tuple | set | frozenset | range)
        return tuple(map(each.kind.read, value if is_sequence else (value,)))
    except ValueError as error:
        raise UsageError(f"{each.flag}: {error}.") from None


def _of_field(field: Field[Any], annotation: Any, option: Option) -> Declared:
    kind, several = value_type(annotation)
    return Declared(
        name=field.name,
        option=option,
        kind=option.kind or kind_of(kind),
        default=None if field.default is MISSING else field.default,
        is_required=field.default is MISSING,
        several=several,
        field=field.name,
    )


def _contributed(name: str, option: Option, field: str) -> Declared:
    kind = kind_of(bool)
    return Declared(name=name.replace("-", "_"), option=option, kind=kind, default=None, field=field, key=name)
