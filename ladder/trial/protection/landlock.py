"""Landlock: a trial may write only in a copy of its working folder and in caches; all else gives it an error.

It needs no privileges and works in most containers. Unlike namespaces it holds the process that asks for it, for ever,
so each rank does that for itself. The kernel then lets no rank look into another one's memory (process_vm_readv,
pidfd_getfd); what torch and NCCL share goes through sockets, CUDA and /dev/shm. Landlock leaves modes, owners and times
of files alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from ladder.trial.protection import kernel
from ladder.trial.protection.caches import compiled_by_inductor, is_in

# Defined in Linux: landlock.h.
_WRITE = 1 << 1 | sum(1 << bit for bit in range(4, 13))
"""To write to files, and to remove and make whatever a folder can have."""
_MOVE, _TRUNCATE = 1 << 13, 1 << 14
"""Defined there, for the second and the third version. The first one never moves anything to another folder."""
_ALWAYS = ("/dev", "/proc")
_SMALL, _MOST_BYTES, _MOST_ENTRIES = 1 << 20, 256 << 20, 2_000
"""Of a file that is copied, of all copies, and entries of the copy. Chosen: more than a folder of code has; it takes
less than a second."""
_MOST_TUNES = 100
"""In one folder at a time. Chosen: more than anybody starts."""


class LandlockView:
    """The rules and the copy for one trial. OSError if the kernel, or a container, does not allow them."""

    def __init__(self, folder: str, kept: Sequence[str]) -> None:
        version = kernel.landlock_version()
        self._place, self._lock = _claimed(os.getcwd())
        self._work, self._temporary = f"{self._place}/work", f"{self._place}/tmp"
        for left in (self._work, self._temporary):  # by a tune that was killed
            shutil.rmtree(left, ignore_errors=True)
        _copy(os.getcwd(), self._work, (folder, *kept))
        os.mkdir(self._temporary)
        allowed = _WRITE | (_MOVE if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
        self._rules = kernel.landlock_rules(allowed)
        for place in (folder, *kept, self._work, self._temporary, *_ALWAYS):
            descriptor = os.open(place, os.O_PATH | os.O_DIRECTORY)
            kernel.landlock_allow(self._rules, allowed, descriptor)
            os.close(descriptor)

    def enter(self) -> None:
        """This process, and what it starts, may write nowhere else from now on."""
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled_by_inductor())
        os.environ.update(TMPDIR=self._temporary, PWD=self._work)
        tempfile.tempdir = None
        os.chdir(self._work)
        kernel.landlock_restrict(self._rules)
        os.close(self._rules)

    def close(self) -> None:
        os.close(self._rules)
        shutil.rmtree(self._place, ignore_errors=True)
        os.close(self._lock)


def _claimed(folder: str) -> tuple[str, int]:
    """A place for trials of scripts in `folder`, and the descriptor that locks it until the last process has closed it.

    It is the same for all of them, as libraries know data that they have prepared by its path. Its path is short,
    because that of a socket in it has at most 107 bytes.
    """
    name = hashlib.sha256(f"{os.getuid()}:{folder}".encode(errors="surrogateescape")).hexdigest()[:12]
    for number in range(_MOST_TUNES):
        place = f"{tempfile.gettempdir()}/ladder-{name}-{number}"
        with suppress(FileExistsError):
            os.mkdir(place, 0o700)
        with suppress(OSError):  # another tune has it, or another user made something of that name
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid() and os.path.samestat(os.fstat(lock), os.stat(place)):
                    return place, lock
            except OSError:
                os.close(lock)
                raise
            os.close(lock)
    raise OSError(f"there is no free place for a copy of {folder} in {tempfile.gettempdir()}")


def _copy(source: str, target: str, real: Sequence[str]) -> None:
    """Copy folders and small files; of large files, of what is too much, and of folders with a `real` one, make links.

    Folders near the top come first.
    """
    entries, size = _MOST_ENTRIES, _MOST_BYTES
    folders = deque([(source, target)])
    while folders:
        folder, copy = folders.popleft()
        os.mkdir(copy)
        for entry in os.scandir(folder):
            there = os.path.join(copy, entry.name)
            entries -= 1
            with suppress(FileNotFoundError, PermissionError):  # somebody has just deleted it, or nobody may see it
                found = entry.stat(follow_symlinks=False)
                is_readable = os.access(entry.path, os.R_OK)
                if entries <= 0 or not is_readable or any(is_in(place, entry.path) for place in real):
                    os.symlink(entry.path, there)
                elif stat.S_ISDIR(found.st_mode):
                    folders.append((entry.path, there))
                elif stat.S_ISREG(found.st_mode) and found.st_size <= min(_SMALL, size):
                    size -= found.st_size
                    shutil.copy2(entry.path, there)
                else:
                    os.symlink(_link(entry, source), there)


def _link(entry: os.DirEntry[str], source: str) -> str:
    """Where a link in the copy leads: one that stays within `source` leads to the copy, any other to the real thing."""
    if entry.is_symlink():
        to = os.readlink(entry.path)
        if not os.path.isabs(to) and is_in(os.path.normpath(os.path.join(entry.path, "..", to)), source):
            return to
    return os.path.realpath(entry.path)
