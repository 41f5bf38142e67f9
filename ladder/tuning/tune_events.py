"""What a tune tells those who watch it: one stream of typed events, in the order in which things happen.

A subscriber is called with each event on the thread that runs the tune, which waits for it: it should return at once.
It must not change what an event holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
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
    """A sentence for the person who waits: a warning, or a default that is not the usual one."""

    text: str


@dataclass(frozen=True)
class SearchBegins:
    """Workload and machine are known, and no trial has run yet."""

    space: Space
    """Every candidate of the tune."""
    unsupported: Mapping[Rung, str]
    """The rungs that cannot work on this machine, each with the reason."""
    records: Sequence[Record]
    """What an earlier start of the same tune has measured."""
    on_paper: bool = False
    """Trials are simulated: their seconds are not the seconds that somebody waits."""


@dataclass(frozen=True)
class TrialBegins:
    """A trial is about to start."""

    spec: TrialSpec
    reason: str
    """Why the search chose it."""


@dataclass(frozen=True)
class RankReported:
    """A rank of the running trial has reported something: a phase, a step, a measurement, a failure, its end."""

    rank: int
    event: Event


@dataclass(frozen=True)
class TrialEnds:
    """A trial is over, and nothing of it runs any more."""

    run: TrialRun
    """What was seen of it."""
    records: Sequence[Record]
    """What it says of its candidates, which is in the history by now; empty if it says nothing."""


@dataclass(frozen=True)
class TuneEnds:
    """The tune is over, and its files are written. A tune that ends with an error sends no such event."""

    answer: Answer | None
    """The proven answer; None if nothing is proven."""
    stopped: str
    """Why the search ended."""
    interrupted: bool
    """The user ended it, and the same command goes on from there: it says nothing of what fits."""


TuneEvent = Note | SearchBegins | TrialBegins | RankReported | TrialEnds | TuneEnds
Subscriber = Callable[[TuneEvent], None]


def ignore(event: TuneEvent) -> None:
    """The subscriber of a tune that nobody watches."""


def each_of(*subscribers: Subscriber) -> Subscriber:
    """One subscriber that passes every event on to all of `subscribers`, in their order."""

    def tell(event: TuneEvent) -> None:
        for subscriber in subscribers:
            subscriber(event)

    return tell


def noting(tell: Subscriber) -> Callable[[str], None]:
    """What tells sentences to `tell`, for those who have nothing else to say."""
    return lambda text: tell(Note(text))


def hearing(tell: Subscriber) -> Callable[[int, Event], None]:
    """What a launcher calls with the ranks' reports so that `tell` hears them."""
    return lambda rank, event: tell(RankReported(rank, event))


def harmless(callback: Subscriber) -> Subscriber:
    """`callback`, which is somebody else's code: hours of trials must not end at a mistake in it.

    Its first exception is logged with its traceback by the logger "ladder", which writes to stderr unless the program
    says otherwise. From then on it is called no more.
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
            _LOG.exception("The callback %s failed and is called no more; the tune goes on.", name)

    return tell
