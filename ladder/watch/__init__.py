"""Shows a tune on stderr: live on a terminal, as plain lines elsewhere, or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ladder.tuning.tune_events import Subscriber, each_of, ignore
from ladder.watch.plain import PlainTune


@contextmanager
def watching(*, quiet: bool, web: bool = False) -> Iterator[Subscriber]:
    """A subscriber that shows a tune on this process's stderr; with `web`, in a page at localhost too."""
    if web:
        from ladder.watch.web import followed_at

        with followed_at() as (page, address), watching(quiet=quiet) as other:
            print(f"Follow this tune at {address} (from this host).", file=sys.stderr, flush=True)
            yield each_of(other, page)
    elif quiet:
        yield ignore
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from rich.console import Console

        from ladder.watch.live import LiveView

        with LiveView(Console(stderr=True, highlight=False)) as view:
            yield view
    else:
        yield PlainTune()
