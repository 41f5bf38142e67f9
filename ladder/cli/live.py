"""A tune on a terminal: the ladder as a table that fills, what runs now, the best so far, and how long it takes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

from ladder.candidates import Rung
from ladder.cli.live_parts import best_line, ladder_table, now_lines, time_line, unsupported_line
from ladder.cli.progress import Progress
from ladder.events.outcome import Record
from ladder.events.protocol import Event, TrialSpec
from ladder.events.trial_run import TrialRun
from ladder.search.space import Space
from ladder.text import shown

_REFRESHES_PER_SECOND = 4
_LINES_AROUND_THE_TABLE = 9


class LiveView:
    """Redraws a few times a second on `console`; what it is told is kept by `Progress`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress()
        self._lock = threading.RLock()
        self._live = Live(
            self, console=console, refresh_per_second=_REFRESHES_PER_SECOND, vertical_overflow="crop", transient=True
        )

    def __enter__(self) -> LiveView:
        self._live.start()
        # Live hides the cursor, and a second Ctrl-C ends the process at once: nobody would bring it back.
        self._console.show_cursor(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(Text(shown(text)))

    def searching(self, space: Space, unsupported: Mapping[Rung, str], records: Sequence[Record]) -> None:
        with self._lock:
            self._progress.searching(space, unsupported, records)

    def trial_begins(self, spec: TrialSpec, reason: str) -> None:
        with self._lock:
            self._progress.trial_begins(spec, reason)

    def event(self, rank: int, event: Event) -> None:
        with self._lock:
            self._progress.event(rank, event)

    def trial_ends(self, run: TrialRun, records: Sequence[Record]) -> None:
        with self._lock:
            self._progress.trial_ends(run, records)
        for record in records:
            for warning in record.warnings:
                self.note(f"{record.candidate_key}: {warning}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            progress, width = self._progress, options.max_width
            if progress.space is None:
                yield Text("Getting ready …", style="dim")
                return
            room = max(4, console.height - _LINES_AROUND_THE_TABLE)
            lines = [unsupported_line(progress), Text(), *now_lines(progress, width)]
            lines += [best_line(progress), time_line(progress)]
            for line in lines:
                line.no_wrap, line.overflow = True, "ellipsis"
            yield Group(Text(), ladder_table(progress, width, room), *lines)
