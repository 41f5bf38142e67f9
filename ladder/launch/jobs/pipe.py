"""A pipe to the agent on one node of a job, with its ends at stdin and stdout: what ssh is for a host.

python -m ladder.launch.jobs.pipe FOLDER NODE
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from ladder.launch.jobs.files import END, POLL_SECONDS, Appended, append, events, requests

_END_SECONDS = 10.0
"""How long the agent may take to end after its stdin has. Chosen: it takes up to 8 s."""


def _feed(file: Path, ended: threading.Event) -> None:
    """Hand over what comes. If a file system fails, Python says so on stderr, and the pipe ends."""
    try:
        while data := os.read(0, 1 << 16):
            append(file, data)
        append(file, END)
    finally:
        ended.set()


def carry(folder: Path, node: int) -> None:
    """Carry both directions until the agent has ended, or should have."""
    ended = threading.Event()
    threading.Thread(target=_feed, args=(requests(folder, node), ended), daemon=True).start()
    said, deadline = Appended(events(folder, node)), None
    while not said.is_over:
        data = said.read()
        with suppress(BrokenPipeError):  # stdin has ended too, which the agent still has to be told
            while data:
                data = data[os.write(1, data) :]
        if ended.is_set():
            deadline = deadline or time.monotonic() + _END_SECONDS
            if time.monotonic() > deadline:
                return
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    carry(Path(sys.argv[1]), int(sys.argv[2]))
