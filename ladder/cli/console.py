"""The console on stdout for tables."""

from __future__ import annotations

import sys

from rich.console import Console

_WIDTH_OF_A_FILE = 160


def stdout_console() -> Console:
    """As wide as the terminal; for a file or a pipe, wide enough for every column."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE, highlight=False)
