"""How a tune is watched: live on a terminal, as plain lines elsewhere, or not at all. Always on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ladder.cli.plain import PlainView

if TYPE_CHECKING:
    from ladder.candidates import Rung
    from ladder.events.outcome import Record
    from ladder.events.protocol import Event, TrialSpec
    from ladder.events.trial_run import TrialRun
    from ladder.search.space import Space
    from ladder.tuning.run import TuneView


@contextmanager
def watching(*, quiet: bool) -> Iterator[TuneView]:
    """The view for this process's stderr, for as long as the tune lasts."""
    if quiet:
        yield QuietView()
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from rich.console import Console

        from ladder.cli.live import LiveView

        with LiveView(Console(stderr=True, highlight=False)) as view:
            yield view
    else:
        yield PlainView()


class QuietView:
    """Says nothing: errors and the answer come by other ways."""

    def note(self, text: str) -> None: ...
    def searching(self, space: Space, unsupported: Mapping[Rung, str], records: Sequence[Record]) -> None: ...
    def trial_begins(self, spec: TrialSpec, reason: str) -> None: ...
    def event(self, rank: int, event: Event) -> None: ...
    def trial_ends(self, run: TrialRun, records: Sequence[Record]) -> None: ...
