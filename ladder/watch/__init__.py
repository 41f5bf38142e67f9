"""Shows a tune on stderr: live on a terminal, as plain lines elsewhere, or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ladder.tuning.tune_events import Subscriber, ignore
from ladder.watch.plain import PlainTune


@contextmanager
def watching(*, quiet: bool) -> Iterator[Subscriber]:
    """A subscriber that shows a tune on this process's stderr."""
    if quiet:
        yield ignore
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from rich.console import Console

        from ladder.watch.live import LiveView

        with LiveView(Console(stderr=True, highlight=False)) as view:
            yield view
    else:
        yield PlainTune()
