"""Loads DeepSpeed's operators; as a program it builds one: `python -m ladder.trial.operators cpu_adam [PID]`.

Operators compile on first use, and two ranks compiling the same one at once can fail; so each is built before trials.
With the pid of its parent, the build and its compilers end as soon as that is gone.
Exit status 0 means it is built and loads; otherwise the last line on stderr says why not.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from ladder.trial.descendants import adopt_orphans, end_descendants

# Our names and the builders DeepSpeed has for them.
BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder", "shm_comm": "ShareMemCommBuilder"}
_LOOK_SECONDS = 1.0
"""Between two looks at a lock. Chosen: short beside a build, which takes a minute or more."""
_CLOSING_SECONDS = 0.2
"""torch closes its lock a moment before it removes it: a lock is abandoned only if it stays so. Chosen: many times that
moment."""
_END_SECONDS = 10.0
"""For compilers to be gone after they were killed. Chosen: what the kernel cannot end by then must not keep us."""


def load(name: str) -> None:
    """Compile operator `name` if need be, and load it into this process. Raises what the build raises.

    torch guards a build with a file that outlives a killed process, and a build that finds one waits and then loads
    what may never have been built. So only one of us at a time builds or loads an operator, and it does not begin
    before torch's file is gone.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    builder = get_accelerator().create_op_builder(BUILDERS[name])
    if builder is None:
        raise RuntimeError(f"DeepSpeed has no {name} operator for this device")
    folder = Path(_get_build_directory(builder.name, False))
    with _turn(folder):
        _await_release(folder / "lock")
        builder.load(verbose=False)


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One process at a time for the operator built in `folder`, on all hosts and in all containers that share it.

    The kernel ends the turn of a process that dies. Where files cannot be locked we do without: torch's own lock is
    left, and whether its holder lives can then be told on this host only.
    """
    with ExitStack() as held:
        with suppress(OSError):
            descriptor = os.open(f"{folder}.ladder-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _await_release(lock: Path) -> None:
    """Wait for whoever holds torch's `lock` without having our turn; one that nobody here has open is removed."""
    with suppress(FileNotFoundError):
        while lock.stat().st_uid == os.getuid():
            if _is_abandoned(lock):
                lock.unlink()
            else:
                time.sleep(_LOOK_SECONDS)


def _is_abandoned(lock: Path) -> bool:
    found = lock.stat()
    if _is_open(found):
        return False
    time.sleep(_CLOSING_SECONDS)
    return lock.stat().st_ino == found.st_ino and not _is_open(found)


def _is_open(wanted: os.stat_result) -> bool:
    """Whether a process of this user has the file open, as the one that builds has."""
    for process in psutil.process_iter():
        for link in Path(f"/proc/{process.pid}/fd").glob("*") if _is_ours(process) else ():
            try:
                found = link.stat()
            except OSError:
                continue
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.uids().real == os.getuid()
    except psutil.Error:
        return False


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CLOSING_SECONDS)
    end_descendants(_END_SECONDS)
    os._exit(1)


def _build(name: str) -> int:
    """The exit status; the reason why not goes to stderr."""
    try:
        load(name)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if "error" in line.lower()), lines[0] if lines else type(error).__name__)
        print(reason[:400], file=sys.stderr)
        return 1
    return 0


def main() -> int:
    if len(sys.argv) == 2:
        return _build(sys.argv[1])
    parent = int(sys.argv[2])
    adopt_orphans()
    supervisor = threading.Thread(target=_end_with, args=(parent,), daemon=True)
    supervisor.start()
    status = _build(sys.argv[1])
    if os.getppid() != parent:
        supervisor.join()  # the build failed because its compilers are being killed, and some may still be alive
    return status


if __name__ == "__main__":
    sys.exit(main())
