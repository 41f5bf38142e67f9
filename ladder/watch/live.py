"""The live view of a tune: a table of the ladder, the running trial, the best candidate so far, and the time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

from ladder.text import shown
from ladder.tuning.tune_events import Note, TrialEnds, TuneEvent
from ladder.watch.live_parts import best_line, ladder_table, now_lines, time_line, unsupported_line
from ladder.watch.progress import Progress

_REFRESHES_PER_SECOND = 4
"""Chosen: rich's default, and as fast as one can read."""
_LINES_AROUND_THE_TABLE = 9
"""Derived: the lines that `Drawing` puts above and below the table, and a spare one."""


class Drawing:
    """What is drawn of a tune at any moment, for a console of any size. `Progress` keeps the state."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._progress = Progress()
        self._lock = threading.RLock()
        self._say = say

    def __call__(self, event: TuneEvent) -> None:
        """Handle an event; the next drawing shows it, and what a user should read is said."""
        with self._lock:
            self._progress(event)
        if isinstance(event, Note):
            self._say(shown(event.text))
        elif isinstance(event, TrialEnds):
            for record in event.records:
                for warning in record.warnings:
                    self._say(shown(f"{record.candidate_key}: {warning}"))

    def headline(self) -> str:
        """The best so far and the time, in one line of text."""
        with self._lock:
            if self._progress.space is None:
                return "Getting ready …"
            return f"{best_line(self._progress).plain} · {time_line(self._progress).plain}"

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


class LiveView:
    """Redraws a few times a second on `console`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # What is said is printed above the live view, where it stays.
        self._drawing = Drawing(lambda text: console.print(Text(text)))
        self._live = Live(
            self._drawing,
            console=console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            vertical_overflow="crop",
            transient=True,
        )

    def __enter__(self) -> Drawing:
        self._live.start()
        # Live hides the cursor, and it would stay hidden if a second Ctrl-C ended the process at once.
        self._console.show_cursor(True)
        return self._drawing

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
