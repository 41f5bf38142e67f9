"""The commands `ladder` and, for when it is not on PATH, `python -m ladder`."""

from __future__ import annotations

import signal
import sys

_ENVIRONMENT_FAULT = 4
"""Defined in ladder/errors.py, of which nothing is imported before Ctrl-C is heeded."""


def start() -> int:
    """Run the command line. Ctrl-C while it is imported ends the process at once, and not with a traceback."""
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:  # otherwise somebody has us ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from ladder.cli.main import main

        signal.signal(signal.SIGINT, interrupted)
        return main()
    except ModuleNotFoundError as error:
        again = "install ladder there again (`python -m pip install oom-ladder`), which brings it."
        print(f"ladder: {error.name} is missing in {sys.prefix}, where ladder runs; {again}", file=sys.stderr)
        return _ENVIRONMENT_FAULT


if __name__ == "__main__":
    sys.exit(start())
