"""The result of one check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

_REPORT = "report it as a bug in ladder, with the output of `ladder doctor --format json`"
Status = Literal["OK", "OPEN", "WARN", "FAIL"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One result. FAIL: tunes, or what the user asked for, cannot work. WARN: some rungs cannot work, or are slow.

    OPEN: nobody has looked, and an option would.
    """

    name: str
    status: Status
    sentence: str
    fix: str = ""
    """What to do about it; empty for OK."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers and versions for a bug report, without secrets and user names."""


def ok(name: str, sentence: str, **facts: Any) -> Check:
    return Check(name=name, status="OK", sentence=sentence, facts=facts)


def unseen(name: str, sentence: str, **facts: Any) -> Check:
    return Check(name=name, status="OPEN", sentence=sentence, facts=facts)


def warn(name: str, sentence: str, fix: str, **facts: Any) -> Check:
    return Check(name=name, status="WARN", sentence=sentence, fix=fix, facts=facts)


def fail(name: str, sentence: str, fix: str, **facts: Any) -> Check:
    return Check(name=name, status="FAIL", sentence=sentence, fix=fix, facts=facts)


def parted(sentence: str, otherwise: str) -> tuple[str, str]:
    """Split an error message into what happened and what to do, which is `otherwise` if it does not say."""
    what, _, remedy = sentence.removesuffix(".").partition("; ")
    return what, remedy or otherwise


def guarded(name: str, look: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """The checks of `look`. If it raises an exception, that is a failed check, and other checks continue."""
    try:
        yield from look()
    except Exception as error:
        yield fail(name, f"could not be checked: {type(error).__name__}: {error}", _REPORT)
