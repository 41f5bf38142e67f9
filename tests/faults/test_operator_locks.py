"""torch guards the build of an operator with a file; a process that is killed meanwhile leaves it behind."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from helpers import is_alive, wait_until

from ladder.trial import operators

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
_WAITS_SECONDS = 3.0
"""For which a process that looks at the lock each second has to go on waiting, once it has come to it."""


@pytest.fixture(scope="module")
def lock(trial_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torch's, of an operator that is built, in a folder of our own: other tests load operators meanwhile."""
    command = [sys.executable, "-c", _FOLDER, "deepspeed_shm_comm"]
    found = Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    return Path(shutil.copytree(found, tmp_path_factory.mktemp("operators") / found.name)) / "lock"


@pytest.fixture
def holder(lock: Path):
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
    subprocess.run(_LOAD, check=True, env=_environment(lock), timeout=60)
    assert not lock.exists()


def waiting_for(lock: Path) -> subprocess.Popen[bytes]:
    """A process that loads the operator, and waits for whoever holds `lock` or goes before."""
    waiting = subprocess.Popen(_LOAD, env=_environment(lock))
    wait_until(lambda: has_open(psutil.Process(waiting.pid), turn_of(lock)), 60)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=_WAITS_SECONDS)
    assert lock.exists()
    return waiting


def test_a_lock_is_waited_for_while_its_build_lives_and_no_longer(lock: Path, holder: subprocess.Popen) -> None:
    waiting = waiting_for(lock)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert waiting.wait(timeout=30) == 0


@pytest.mark.night("it compiles an operator")
def test_a_build_that_was_killed_before_it_linked_is_built_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / "deepspeed_shm_comm" / "lock"
    left.parent.mkdir()
    left.touch()
    subprocess.run(_LOAD, check=True, env=_environment(left), timeout=280)
    assert (left.parent / "deepspeed_shm_comm.so").exists()
    assert not left.exists()


def turn_of(lock: Path) -> Path:
    return Path(f"{lock.parent}.ladder-lock")


@contextmanager
def in_turn(lock: Path) -> Iterator[None]:
    """We build the operator, as far as any host or container that shares the folder can tell."""
    with turn_of(lock).open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def has_open(process: psutil.Process, path: Path) -> bool:
    return any(each.path == str(path) for each in process.open_files())


def test_a_lock_whose_holder_cannot_be_seen_from_here_is_left_to_it(lock: Path) -> None:
    with in_turn(lock):
        lock.touch()
        waiting = waiting_for(lock)
    assert waiting.wait(timeout=30) == 0
    assert not lock.exists()


def test_a_build_that_waits_for_its_turn_ends_with_its_parent(lock: Path) -> None:
    program = "import os, subprocess, sys; subprocess.run([*sys.argv[1:], str(os.getpid()), '0'])"
    with in_turn(lock):
        parent = subprocess.Popen([sys.executable, "-c", program, *_LOAD], env=_environment(lock))
        wait_until(lambda: any(has_open(it, turn_of(lock)) for it in psutil.Process(parent.pid).children()), 60)
        (waiting,) = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait()
        wait_until(lambda: not is_alive(waiting), 10)


def test_two_operators_are_built_side_by_side(tmp_path: Path) -> None:
    with operators._turn(tmp_path / "one"), operators._turn(tmp_path / "other"):
        assert len(list(tmp_path.iterdir())) == 2


def test_where_files_cannot_be_locked_operators_are_built_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    taken = []
    with operators._turn(tmp_path / "one"), operators._turn(tmp_path / "one"):
        taken.append("both")
    assert taken == ["both"]


def _environment(lock: Path) -> dict[str, str]:
    return {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(lock.parents[1])}
