"""What tests of clusters ask of this machine when a tune is over."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def leaves_nothing() -> Callable[[], None]:
    """Waits, at most five seconds, until no process of the test's trials is left on this machine: it is all nodes.

    A server that tests share may have run before.
    """
    before = _of_trials().keys()

    def check() -> None:
        deadline = time.monotonic() + 5
        while (left := _of_trials().keys() - before) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [_of_trials().get(pid) for pid in left] == []

    return check


def _of_trials() -> dict[int, str]:
    ours = b"LADDER_CACHE=" + os.environ["LADDER_CACHE"].encode()  # a tune beside the tests has another
    found: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if ours not in path.with_name("environ").read_bytes().split(b"\0"):
                continue
            programs = [word for word in words if word in (b"ladder.trial.server", b"ladder.launch.nodes.agent")]
            found |= {int(path.parent.name): word.decode() for word in programs}
    return found
