"""What other programs take of a rank's cores is told from what the tune's own processes take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ladder.trial.other_programs import OtherPrograms

pytestmark = pytest.mark.alone("other tests' programs would be others too")
SPIN = "while True: pass"
STRANGER = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {SPIN!r}], start_new_session=True, stdout=subprocess.DEVNULL).pid)
"""


@contextmanager
def spinning(*, is_ours: bool) -> Iterator[None]:
    """A program that wants a whole core all the time."""
    if is_ours:
        with subprocess.Popen([sys.executable, "-c", SPIN]) as process:
            yield
            process.kill()
        return
    # Its parent ends at once, so that it is nobody's descendant here.
    pid = int(subprocess.run([sys.executable, "-c", STRANGER], stdout=subprocess.PIPE, check=True).stdout)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def _one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux")
@pytest.mark.parametrize("is_ours", [True, False])
def test_what_others_take_of_a_full_core_is_told_and_what_a_tune_s_own_processes_take_is_not(is_ours: bool) -> None:
    others = OtherPrograms()
    with spinning(is_ours=is_ours):
        others.reset()
        until = time.monotonic() + 2
        while time.monotonic() < until:
            pass
        share = others.share()
    assert share is not None
    assert (share > 0.25) is not is_ours


def test_where_cores_are_idle_nobody_takes_anything() -> None:
    others = OtherPrograms()
    others.reset()
    assert others.share() is None, "too little time has passed"
    time.sleep(1)
    assert others.share() in (0.0, None) or os.getloadavg()[0] > 1
