"""How an option is declared: once, as an annotated field of a frozen dataclass.

    steps: Annotated[int | None, Option("Time this many optimizer steps.", kind=whole(1))] = None

The command line, the checks of what Python callers write, `ladder.yaml` and its schema, and the reference page follow
from that. A field that is a mapping takes switches that other modules contribute:

    techniques: Annotated[Mapping[str, bool], Switches(registered)] = field(default_factory=dict)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Protocol, TypeVar, get_type_hints

from ladder.errors import UsageError
from ladder.tuning.option_kinds import Kind, kind_of, value_type

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """What is declared of an option beside its type and its default."""

    help: str
    panel: str | None = None
    """Under which heading it stands in a help."""
    kind: Kind | None = None
    """What values it takes, where the type alone does not say."""
    flag: str | None = None
    """What it is called on the command line, where that is not the field's name."""
    short: str | None = None
    """One letter for it, such as `-q`."""
    metavar: str | None = None
    """What stands for its value in a help, where that is not its kind's."""
    unset: str | None = None
    """What happens where it is left out, in a few words, if the default does not say it."""
    is_argument: bool = False
    """It is typed without a name."""
    names: Callable[[], Iterable[str]] | None = None
    """Values that a shell can complete; there may be others. Called only then."""


class Contributed(Protocol):
    """A switch that another module contributes: on, off, or left to ladder where nobody says.

    It may have an `unset` too, as an Option has.
    """

    @property
    def name(self) -> str:
        """As it is typed, without dashes at its front."""

    @property
    def help(self) -> str:
        """One sentence."""

    @property
    def panel(self) -> str:
        """Under which heading it stands in a help."""


@dataclass(frozen=True)
class Switches:
    """Marks a field whose value is a mapping from the names of contributed switches to what was said of them.

    `listed` is a function with a name: a lambda in an annotation finds nothing of its module.
    """

    listed: Callable[[], Iterable[Contributed]]


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One option as all its readers see it."""

    name: str
    """What Python callers call it."""
    option: Option
    kind: Kind
    default: Any
    is_required: bool = False
    several: bool = False
    """It takes several values, in a tuple."""
    field: str
    """Where its value lands."""
    key: str | None = None
    """And under which key, where that is a mapping."""

    @property
    def flag(self) -> str:
        """What sentences and the command line call it."""
        if self.option.is_argument:
            return self.name.upper()
        return self.option.flag or "--" + self.name.replace("_", "-")

    @property
    def may_be_none(self) -> bool:
        """None stands for a default of our own."""
        return self.default is None and not self.is_required


def declared(options: type) -> dict[str, Declared]:
    """The options that a dataclass declares, by the names that Python callers use."""
    hints = get_type_hints(options, include_extras=True)
    found: list[Declared] = []
    for field in fields(options):
        hint = hints[field.name]
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Switches):
                found += [_contributed(each, field.name) for each in note.listed()]
            elif isinstance(note, Option):
                found.append(_of_field(field, hint.__origin__, note))
    return {each.name: each for each in found}


def gathered(options: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass with `values` by option; what is not among them has its default."""
    known, given = declared(options), dict[str, Any]()
    for name, value in values.items():
        each = known[name]
        if each.key is None:
            given[each.field] = value
        elif value is not None:
            given[each.field] = {**given.get(each.field, {}), each.key: value}
    return options(**given)


def spread(options: Any) -> dict[str, Any]:
    """The reverse: the values by option."""
    return {
        name: getattr(options, each.field) if each.key is None else getattr(options, each.field).get(each.key)
        for name, each in declared(type(options)).items()
    }


def checked_values(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by option, as Python callers write them, in their own types.

    A size may be a text with its unit, a path a text, and one thing may stand for a sequence of one. None is for
    options with a default of our own. UsageError, in one sentence, for what cannot be: the search and the files would
    meet it after hours of trials.
    """
    known = declared(options)
    return {name: _checked(known[name], value) for name, value in values.items()}


def checked(options: T) -> T:
    """`options` with every value as its type says. UsageError, in one sentence, for one that cannot be."""
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


def _contributed(switch: Contributed, field: str) -> Declared:
    return Declared(
        name=switch.name.replace("-", "_"),
        option=Option(switch.help, switch.panel, unset=getattr(switch, "unset", None)),
        kind=kind_of(bool),
        default=None,
        field=field,
        key=switch.name,
    )
