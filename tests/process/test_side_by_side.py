"""Commands that the comparison with other tools starts: limited in time, and ended with all that they started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
from side_by_side import run

CHILD = "import time; time.sleep(600)"
PARENT = f"""
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], start_new_session=True)
Path("child").write_text(str(child.pid))
print("started", flush=True)
time.sleep(float(sys.argv[1]))
"""


def runs(pid: int) -> bool:
    """A zombie does not: in a container, nobody may be there to reap it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_command_over_its_time_is_ended_with_its_detached_children_and_nothing_else_is(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", CHILD])
    ended = run([sys.executable, "-c", PARENT, "600"], longest=5.0, folder=tmp_path)
    is_left_alone = bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert is_left_alone
    assert ended.code is None
    assert ended.text == "started\n"
    assert ended.why == f"time was over after {ended.seconds:.0f} s"
    assert not runs(int((tmp_path / "child").read_text()))


def test_what_a_command_leaves_behind_is_ended_too(tmp_path: Path) -> None:
    ended = run([sys.executable, "-c", PARENT, "0"], longest=60.0, folder=tmp_path)
    assert ended.code == 0
    assert not runs(int((tmp_path / "child").read_text()))
