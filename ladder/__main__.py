"""The commands `ladder` and, for when it is not on PATH, `python -m ladder`."""

from __future__ import annotations

import signal
import sys


def start() -> int:
    """Run the command line. Ctrl-C while it is imported ends the process at once, and not with a traceback."""
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:  # otherwise somebody has us ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ladder.cli.main import main

    signal.signal(signal.SIGINT, interrupted)
    return main()


if __name__ == "__main__":
    sys.exit(start())
