"""What tests of clusters ask of this machine when a tune is over."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def leaves_nothing() -> Callable[[], None]:
    """Waits, at most five seconds, until no process of these tests' trials is left on this machine: it is all nodes."""

    def check() -> None:
        deadline = time.monotonic() + 5
        while (left := _of_trials()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []

    return check


def _of_trials() -> list[str]:
    ours = b"LADDER_CACHE=" + os.environ["LADDER_CACHE"].encode()  # a tune beside the tests has another
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if ours not in path.with_name("environ").read_bytes().split(b"\0"):
                continue
            found += [word.decode() for word in words if word in (b"ladder.trial.server", b"ladder.launch.nodes.agent")]
    return found
