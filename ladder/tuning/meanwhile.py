"""Work for the reports that is done while the proof runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from ladder.tuning.tune_events import Subscriber, TrialBegins, TuneEvent


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
