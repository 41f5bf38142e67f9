"""Calls of the Linux kernel that Python has no function for."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000  # defined in sched.h
NOSUID, BIND, RECURSIVE, SLAVE = 0x2, 0x1000, 0x4000, 0x80000  # defined in mount.h
_READ_ONLY, _AT_FDCWD, _AT_RECURSIVE = 0x1, -100, 0x8000  # defined in mount.h and fcntl.h
_PDEATHSIG, _DROP_BOUNDING, _CHILD_SUBREAPER, _NO_NEW_PRIVILEGES = 1, 24, 36, 38  # defined in prctl.h
_CAPABILITIES_VERSION, _SYS_ADMIN = 0x20080522, 21  # defined in capability.h
# Defined in unistd.h, for all architectures alike.
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


class _LandlockPath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def in_words(error: BaseException) -> str:
    """What failed and why."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _call(name: str, *arguments: Any, what: str = "") -> int:
    """What libc's function returns. OSError if it fails, which names it, or `what`."""
    result = int(getattr(_LIBC, name)(*arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what or name)
    return result


def _system_call(number: int, *arguments: Any, what: str) -> int:
    return _call("syscall", ctypes.c_long(number), *arguments, what=what)


def unshare(flags: int) -> None:
    _call("unshare", flags)


def enter(namespace: int) -> None:
    """Go into the namespace that a descriptor stands for."""
    _call("setns", namespace, 0)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    words = [os.fsencode(word) or None for word in (source, target, kind)]
    _call("mount", *words, ctypes.c_ulong(flags), os.fsencode(data) or None, what=f"mount {kind or target}")


def make_read_only(place: str) -> None:
    """The mount at `place` and all below it."""
    attributes = _MountAttributes(attr_set=_READ_ONLY)
    sizes = ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes))
    where = ctypes.c_long(_AT_FDCWD), os.fsencode(place), ctypes.c_long(_AT_RECURSIVE)
    _system_call(_MOUNT_SETATTR, *where, *sizes, what=f"mount_setattr {place}")


def die_with_parent(signal: int) -> None:
    _call("prctl", _PDEATHSIG, signal)


def adopt_orphans() -> None:
    """From now on, a descendant whose parent ends becomes a child of this process and not of init."""
    _call("prctl", _CHILD_SUBREAPER, 1, 0, 0, 0)


def drop_capabilities() -> None:
    """What only mounting and namespaces need, so that nothing looks behind the view by accident.

    A user who is not root has all others in a user namespace too, which would open files that are closed to him.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the same of those above 31
    _call("capget", header, sets)
    _call("prctl", _DROP_BOUNDING, _SYS_ADMIN, 0, 0, 0)
    for place in range(6):
        sets[place] = sets[place] & ~(1 << _SYS_ADMIN if place < 3 else 0) if os.getuid() == 0 else 0
    _call("capset", header, sets)


def landlock_version() -> int:
    return _system_call(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1), what="Landlock")


def landlock_rules(handled: int) -> int:
    """A descriptor of rules that refuse what `handled` names, wherever nothing allows it."""
    what = ctypes.c_uint64(handled)
    size = ctypes.c_size_t(ctypes.sizeof(what))
    return _system_call(_LANDLOCK_CREATE, ctypes.byref(what), size, ctypes.c_uint32(0), what="Landlock")


def landlock_allow(rules: int, allowed: int, below: int) -> None:
    """Allow that below the folder whose descriptor is `below`."""
    path = _LandlockPath(allowed=allowed, parent=below)
    _system_call(_LANDLOCK_ADD, rules, 1, ctypes.byref(path), ctypes.c_uint32(0), what="Landlock")


def landlock_restrict(rules: int) -> None:
    """This process and its descendants, for ever."""
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _system_call(_LANDLOCK_RESTRICT, rules, ctypes.c_uint32(0), what="Landlock")
