"""The typed events of a tune, in the order in which things happen.

A subscriber is called with each event on the thread that runs the tune, which waits for it, so it should return at
once. It must not change an event.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ladder.candidates import Rung
    from ladder.emit import Answer
    from ladder.events.outcome import Record
    from ladder.events.protocol import Event, TrialSpec
    from ladder.events.trial_run import TrialRun
    from ladder.search.space import Space

_LOG = logging.getLogger("ladder")


@dataclass(frozen=True)
class Note:
    """A sentence for the user: a warning, or a default that is not the usual one."""

    text: str


@dataclass(frozen=True)
class SearchBegins:
    """Workload and machine are known, and no trial has run yet."""

    space: Space
    """Every candidate of the tune."""
    unsupported: Mapping[Rung, str]
    """The rungs that cannot work on this machine, each with the reason."""
    records: Sequence[Record]
    """What an earlier start of the same tune measured."""
    on_paper: bool = False
    """Trials are simulated: their seconds are not real time."""


@dataclass(frozen=True)
class TrialBegins:
    """A trial is about to start."""

    spec: TrialSpec
    reason: str
    """Why the search chose it."""


@dataclass(frozen=True)
class RankReported:
    """A rank of the running trial has reported a phase, a step, a measurement, a failure or its end."""

    rank: int
    event: Event


@dataclass(frozen=True)
class TrialEnds:
    """A trial has ended, and so have all its processes, unless they wait for the next trial."""

    run: TrialRun
    """What was observed."""
    records: Sequence[Record]
    """Its results, one per candidate, which are in the history already; may be empty."""


@dataclass(frozen=True)
class TuneEnds:
    """The tune has ended, and its files are written. A tune that ends with an error sends no such event."""

    answer: Answer | None
    """The proven answer; None if nothing is proven."""
    stopped: str
    """Why the search ended."""
    interrupted: bool
    """The user ended it. The result is not final: the same command continues from there."""


TuneEvent = Note | SearchBegins | TrialBegins | RankReported | TrialEnds | TuneEnds
Subscriber = Callable[[TuneEvent], None]


def ignore(event: TuneEvent) -> None:
    """A subscriber that does nothing."""


def each_of(*subscribers: Subscriber) -> Subscriber:
    """One subscriber that passes every event on to all `subscribers`, in their order."""

    def tell(event: TuneEvent) -> None:
        for subscriber in subscribers:
            subscriber(event)

    return tell


def noting(tell: Subscriber) -> Callable[[str], None]:
    """A function that sends a sentence to `tell` as a Note."""
    return lambda text: tell(Note(text))


def hearing(tell: Subscriber) -> Callable[[int, Event], None]:
    """A launcher's listener that sends the ranks' events to `tell`."""
    return lambda rank, event: tell(RankReported(rank, event))


def harmless(callback: Subscriber) -> Subscriber:
    """The user's `callback`, wrapped so that an exception in it does not end the tune.

    Its first exception is logged with its traceback by the logger "ladder", which writes to stderr unless the program
    configures it. After that, it is not called again.
    """
    failed = False

    def tell(event: TuneEvent) -> None:
        nonlocal failed
        if failed:
            return
        try:
            callback(event)
        except Exception:
            failed = True
            name = getattr(callback, "__qualname__", type(callback).__qualname__)
            _LOG.exception("The callback %s failed and will not be called again; the tune continues.", name)

    return tell


def meanwhile(tell: Subscriber, work: Callable[[], object]) -> Subscriber:
    """`tell`, with a thread that does `work` whenever a proof begins: its ranks start, and nothing is timed yet.

    An error of `work` ends only the thread, since whoever needs its results does the same again and fails in the same
    way. Python waits for the thread before it ends.
    """

    def attempt() -> None:
        with suppress(Exception):
            work()

    def hear(event: TuneEvent) -> None:
        tell(event)
        if isinstance(event, TrialBegins) and event.spec.proof:
            threading.Thread(target=attempt, name="meanwhile").start()

    return hear
