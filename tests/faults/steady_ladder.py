"""The command line with what varies taken out, for tests that compare answers: `python steady_ladder.py tune …`.

Operators count as built (the tests' fixtures build them), and the speed of a candidate that fits comes from a table.
Everything else is real: controller, server, ranks, history.
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios
from dataclasses import replace
from typing import Any

import ladder.events.verdict
import ladder.launch.operator_builds

SPEEDS = {"zero0": 100.0, "zero1": 200.0, "zero2": 400.0, "zero3": 300.0}
ANSWER = "zero2 ckpt=on mb=1"
_judge = ladder.events.verdict.judge


def steady(*arguments: Any) -> Any:
    return [
        replace(record, tokens_per_second=SPEEDS[record.candidate_key.split()[0]]) if record.measurement else record
        for record in _judge(*arguments)
    ]


def take_terminal() -> None:
    """As a shell's foreground job: our stdin, if it is a terminal, sends us Ctrl-C and the hang-up."""
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


if __name__ == "__main__":
    take_terminal()
    ladder.events.verdict.judge = steady  # type: ignore[assignment]
    if "TORCH_EXTENSIONS_DIR" not in os.environ:  # a test may have them built in a folder of its own
        builds = ladder.launch.operator_builds.OperatorBuilds
        builds.begin = lambda self, names, **_: []  # type: ignore[method-assign]
        builds.wait = lambda self, names, *_: dict.fromkeys(names)  # type: ignore[method-assign]
    from ladder.cli.main import main

    sys.exit(main())
