"""Loads DeepSpeed's operators; as a program it builds one: `python -m ladder.trial.operators cpu_adam [PID NICE]`.

DeepSpeed compiles operators on first use, which can fail if two ranks do it at once; so each is built before trials.
If PID is given, it is the parent's: the build and its compilers end as soon as the parent has ended. They stand back
behind other processes by NICE.
Exit status 0 means that the operator is built and can be loaded; otherwise the last line on stderr says why not.
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

from ladder.trial.descendants import end_descendants
from ladder.trial.protection import kernel

# Our names of operators, and DeepSpeed's builders for them.
BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "async_io": "AsyncIOBuilder",
    "shm_comm": "ShareMemCommBuilder",
    "fused_adam": "FusedAdamBuilder",
}
_LOOK_SECONDS = 1.0
"""Between two checks of a lock. Chosen: short compared with a build, which takes a minute or more."""
_CLOSING_SECONDS = 0.2
"""How long a lock file must stay closed to count as abandoned: torch closes it a moment before it removes it. Chosen:
many times that moment. Also the time between two checks of whether the parent still exists."""
_END_SECONDS = 10.0
"""How long killed compilers may take to end. Chosen: a process that the kernel cannot end must not block us longer."""


def load(name: str) -> None:
    """Compile operator `name` if need be, and load it into this process. Raises what the build raises.

    torch locks a build with a file that remains when the process is killed. A build that finds the file waits, and then
    loads an operator that may never have been built. So only one process of ladder at a time builds or loads an
    operator, and only after torch's file is gone.
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
    """Hold the lock on the operator built in `folder`, among all hosts and containers that share the folder.

    The kernel releases the lock when the process ends. If the file system has no locks, only torch's own lock file
    remains, and whether its owner is alive can be seen on this host only.
    """
    with ExitStack() as held:
        with suppress(OSError):
            descriptor = os.open(f"{folder}.ladder-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _await_release(lock: Path) -> None:
    """Wait until torch's `lock`, held by a process outside ladder, is gone; remove it if no process has it open."""
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
    """Whether a process of this user has the file open, as a process that builds does."""
    for process in Path("/proc").glob("[0-9]*"):
        for link in (process / "fd").glob("*") if _is_ours(process) else ():
            try:
                found = link.stat()
            except OSError:
                continue
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def _is_ours(process: Path) -> bool:
    try:
        lines = (process / "status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split()[:2] == ["Uid:", str(os.getuid())] for line in lines)  # the real one comes first


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CLOSING_SECONDS)
    end_descendants(_END_SECONDS)
    os._exit(1)


def _build(name: str) -> int:
    """The exit status; the reason for a failure is written to stderr."""
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
    os.nice(int(sys.argv[3]))
    kernel.adopt_orphans()
    supervisor = threading.Thread(target=_end_with, args=(parent,), daemon=True)
    supervisor.start()
    status = _build(sys.argv[1])
    if os.getppid() != parent:
        supervisor.join()  # the build failed because its compilers are being killed, and some may still be alive
    return status


if __name__ == "__main__":
    sys.exit(main())
