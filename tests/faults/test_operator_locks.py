"""torch guards the build of an operator with a file; a process that is killed meanwhile leaves it behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_HOLD = """
import sys
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
print("held", flush=True)
sys.stdin.readline()
baton.release()
"""
_LOAD = [sys.executable, "-m", "ladder.trial.operators", "shm_comm"]
_FOLDER = "import sys; from torch.utils.cpp_extension import _get_build_directory as d; print(d(sys.argv[1], False))"


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    subprocess.run(_LOAD, check=True, env=_environment(), timeout=300)


@pytest.fixture
def lock() -> Path:
    found = subprocess.run(
        [sys.executable, "-c", _FOLDER, "deepspeed_shm_comm"], check=True, capture_output=True, text=True
    )
    return Path(found.stdout.strip()) / "lock"


@pytest.fixture
def holder(lock: Path):  # type: ignore[no-untyped-def]
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    lock.unlink(missing_ok=True)


def test_a_lock_left_by_a_killed_build_does_not_hold_up_the_next_load(lock: Path, holder: subprocess.Popen) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert lock.exists(), "the fault did not happen"
    subprocess.run(_LOAD, check=True, env=_environment(), timeout=60)
    assert not lock.exists()


def test_a_lock_is_waited_for_while_its_build_lives_and_no_longer(lock: Path, holder: subprocess.Popen) -> None:
    waiting = subprocess.Popen(_LOAD, env=_environment())
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=15)
    assert lock.exists()
    holder.send_signal(signal.SIGKILL)
    assert waiting.wait(timeout=30) == 0


def _environment() -> dict[str, str]:
    return {**os.environ, "DS_ACCELERATOR": "cpu"}
