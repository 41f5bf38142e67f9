"""Leases: only one tune uses a GPU, or the CPU. A lease is a file lock, which the kernel releases with its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from ladder.errors import EnvironmentFaultError, LadderError
from ladder.machine.described import Gpu
from ladder.machine.gpus import Obstacle, obstacle
from ladder.text import digest_of

# Shared by all users of the host, because they share its GPUs. Not TMPDIR, which differs between logins.
_FOLDER = Path("/tmp/ladder-leases")
_POLL_SECONDS = 0.5
"""Between two checks of GPUs that are not free. Chosen: a delay that nobody notices, and a check costs little."""
_PASSING_SECONDS = 15.0
"""How long a tune waits without --wait: the driver needs seconds to free the memory of a process that ended. Chosen:
several times as long."""
_MOST_TEXT = 4096
"""Bytes to read from a lease, to which every user can write. Chosen: the longest path on Linux."""


class InterruptedWaitError(LadderError):
    """The user stopped waiting for GPUs or nodes before anything began."""

    exit_code = 130


class BusyGpusError(EnvironmentFaultError):
    """GPUs, or cores, that will be free again, but are not yet."""


class Leases:
    """The GPUs or the cores of one tune, held until `close` or the end of this process."""

    def __init__(
        self,
        *,
        wait: bool = False,
        note: Callable[[str], None] = lambda text: None,
        cancelled: Callable[[], bool] = lambda: False,
        folder: Path | None = None,
    ) -> None:
        self._wait, self._note, self._cancelled = wait, note, cancelled
        self._folder = folder or Path(os.environ.get("LADDER_LEASES", _FOLDER))
        self._held: dict[str, int] = {}
        self.waited = 0.0
        """Seconds that the tune has waited for GPUs or cores."""

    def hold_cores(self) -> None:
        """Lease the cores that this process may use: two tunes on the same ones would measure each other.

        BusyGpusError if another tune has them, unless the user asked to wait. Where leases cannot be kept, a note says
        so: unlike a GPU, a CPU can be shared.
        """
        name, before, began = f"cpu-{digest_of(sorted(os.sched_getaffinity(0)), 8)}", self.waited, time.monotonic()
        told = ""
        while (found := self._obstacle_on_the_cpu(name)) is not None:
            if not self._wait:
                raise BusyGpusError(f"{found.sentence}, or give it other cores (taskset).")
            if not told:
                told = found.sentence
                self._note(waiting(told))
            self._pause(before - began, "the CPU")

    def _pause(self, since: float, what: str) -> None:
        """Wait a moment for `what`; `since` and the clock's reading add up to the seconds waited."""
        time.sleep(_POLL_SECONDS)
        self.waited = since + time.monotonic()
        if self._cancelled():
            raise InterruptedWaitError(f"interrupted while waiting for {what}.")

    def _obstacle_on_the_cpu(self, name: str) -> Obstacle | None:
        try:
            return self._lease(name, "The CPU")
        except EnvironmentFaultError as error:
            self._note(f"Warning: another tune here would not know of this one. {error}")
            return None

    def choose(self, visible: Sequence[Gpu], count: int, needed: int | None) -> Sequence[Gpu]:
        """Lease the first `count` GPUs that have `needed` bytes free and that nobody uses; see `machine.Choice`.

        If there are too few, it waits if the user asked for that or if the obstacle will pass by itself. Otherwise
        EnvironmentFaultError says who or what uses them: BusyGpusError where it may end. No other process is touched.
        """
        passing_until = time.monotonic() + _PASSING_SECONDS
        before, began = self.waited, time.monotonic()
        told = ""
        while True:
            chosen, in_the_way = self._try(visible, count, needed)
            if len(chosen) == count:
                return chosen
            self.close()  # hold no lease while waiting, so that two tunes cannot wait for each other
            lasting = [found for found in in_the_way if found.lasting]
            first = (lasting or in_the_way)[0]
            hopeless = len(visible) - len(lasting) < count
            passing = sum(not found.passing for found in in_the_way) <= len(visible) - count
            patient = self._wait or (passing and time.monotonic() < passing_until)
            if hopeless or not patient:
                kind = EnvironmentFaultError if hopeless else BusyGpusError
                raise kind(f"{first.sentence}, or choose other GPUs with CUDA_VISIBLE_DEVICES.")
            if self._wait and first.sentence != told:
                told = first.sentence
                self._note(waiting(told))
            self._pause(before - began, "GPUs")

    def _try(self, visible: Sequence[Gpu], count: int, needed: int | None) -> tuple[list[Gpu], list[Obstacle]]:
        chosen: list[Gpu] = []
        in_the_way: list[Obstacle] = []
        for gpu in visible:
            if len(chosen) == count:
                break
            leased = None if gpu.fault else self._lease(gpu.uuid, f"GPU {gpu.uuid} ({gpu.name})")
            found = leased or obstacle(gpu, needed)
            if found is None:
                chosen.append(gpu)
                continue
            self._release(gpu.uuid)
            in_the_way.append(found)
        return chosen, in_the_way

    def name_run(self, run_folder: Path) -> None:
        """Write into every lease which run it is for."""
        for descriptor in self._held.values():
            _write_holder(descriptor, run_folder)

    def _lease(self, name: str, what: str) -> Obstacle | None:
        """Take the lease called `name`, of `what`; returns who holds it if it is taken already."""
        path = self._folder / re.sub(r"[^\w-]", "_", name)
        try:
            _make_shared(self._folder)
            descriptor = _open_shared(path)
        except OSError as error:
            raise EnvironmentFaultError(
                f"{what} cannot be leased ({path}: {error.strerror}); let every user write to "
                f"{self._folder}, or set LADDER_LEASES to a folder that all tunes of this host share."
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if error.errno != errno.EWOULDBLOCK:
                raise EnvironmentFaultError(
                    f"{self._folder} does not support file locks ({error.strerror}); set LADDER_LEASES to a folder on "
                    "a local disk."
                ) from None
            return Obstacle(f"{what} is held by another tune ({holder}); wait for it with --wait")
        self._held[name] = descriptor
        _write_holder(descriptor, None)
        return None

    def _release(self, name: str) -> None:
        descriptor = self._held.pop(name, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)

    def close(self) -> None:
        """Release all leases."""
        for name in list(self._held):
            self._release(name)

    def __enter__(self) -> Leases:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def waiting(sentence: str) -> str:
    """What a tune that waits tells of the obstacle that `sentence` describes."""
    return f"Waiting: {sentence.split(';')[0]}."


def _make_shared(folder: Path) -> None:
    """Create a folder like /tmp: every user can add a lease, but not remove another user's."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        return
    folder.chmod(0o1777)


def _open_shared(path: Path) -> int:
    """Open a file that every user can read and write. OSError for a link or anything else but a regular file."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        # Without O_CREAT, which is forbidden for another user's file in such a folder (fs.protected_regular).
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(descriptor, 0o666)  # the umask may have removed some permissions
        except FileExistsError:
            descriptor = os.open(path, flags)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "it is not a regular file of ladder", str(path))
    return descriptor


def _write_holder(descriptor: int, run_folder: Path | None) -> None:
    text = json.dumps({"pid": os.getpid(), "run_folder": str(run_folder.resolve()) if run_folder else None})
    with contextlib.suppress(OSError):  # only the lock matters; without this the next tune cannot name the holder
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _holder(descriptor: int) -> str:
    """The holder that is named in the lease. Every user can write there, so this is only shown and not relied on."""
    try:
        holder = json.loads(os.pread(descriptor, _MOST_TEXT, 0))
        pid, run_folder = int(holder["pid"]), holder["run_folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return "pid unknown"
    return f"pid {pid}" if run_folder is None else f"pid {pid}, run folder {str(run_folder)[:200]!r}"
