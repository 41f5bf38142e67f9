"""A view of the files in which a trial writes what it likes: overlays, thrown away with the last process in it.

Each trial has a new one, which its ranks share: they read what rank 0 writes, and no trial sees what another one wrote.
A child of the server makes the namespaces and ends; the ranks, which are forked from the server, go into them. So the
server itself stays outside, and may have threads. The kernel removes the mounts, and the memory behind them, with the
last process, however that ends.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ladder.trial.protection import kernel
from ladder.trial.protection.caches import is_in

_AS_THEY_ARE = ("/dev", "/proc", "/sys")
_SMALL = 1 << 20
"""Bytes. Chosen: more than a script or a configuration has."""
_MOST_ENTRIES = 3000
"""Of a folder that is rebuilt: half a second for as many folders, 0.2 s for as many files, measured on two cores."""

_SECONDS = 60.0
"""To make a view. Chosen: a hundred times what it takes."""


class OverlayView:
    """The namespaces of one trial. OSError if the kernel, or a container, does not allow them."""

    def __init__(self, folder: str, kept: Sequence[str], size: int) -> None:
        """`folder` and the folders in `kept` stay what they are; all else that is written may take `size` bytes."""
        self._cwd = os.getcwd()
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with its:
                pid = os.fork()
                if pid == 0:
                    _make(its, folder, kept, size, self._cwd)
            ours.settimeout(_SECONDS)  # a file system may not answer
            try:
                self._descriptors = _made(ours, pid)
            finally:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def enter(self) -> None:
        """This process sees the view from now on. It must have no other thread."""
        *namespaces, root = self._descriptors
        for namespace in namespaces:
            kernel.enter(namespace)
        os.fchdir(root)
        os.chroot(".")
        os.chdir(self._cwd)
        self.close()
        kernel.drop_capabilities()

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def _made(line: socket.socket, pid: int) -> list[int]:
    """The descriptors that the child `pid` sends."""
    while True:
        said, descriptors, *_ = socket.recv_fds(line, 4096, 3)
        if said == b"map":
            _keep_users(pid)
            line.send(b"mapped")
        elif said == b"made":
            return descriptors
        else:
            raise OSError(said.decode(errors="replace") or "its process ended")


def _keep_users(pid: int) -> None:
    """In the user namespace of `pid` users are who they are: all of them if we may say so, or else this one."""
    for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        with open(f"/proc/self/{kind}_map") as file:
            ranges = [line.split() for line in file]
        try:
            _write(f"/proc/{pid}/{kind}_map", "".join(f"{first} {first} {count}\n" for first, _, count in ranges))
        except PermissionError:
            if kind == "gid":
                _write(f"/proc/{pid}/setgroups", "deny")
            _write(f"/proc/{pid}/{kind}_map", f"{own} {own} 1\n")


def _write(file: str, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _make(line: socket.socket, folder: str, kept: Sequence[str], size: int, cwd: str) -> None:
    """In the child: make the view, send its descriptors, and end."""
    try:
        kernel.die_with_parent(signal.SIGKILL)
        kinds, attribute, options = _isolate(line)
        kernel.mount("", "/", flags=kernel.RECURSIVE | kernel.SLAVE)
        layers = _Layers(folder, options)
        real = os.open(folder, os.O_PATH)
        kernel.mount("tmpfs", folder, "tmpfs", kernel.NOSUID, f"mode=0755,size={size}")
        try:
            os.setxattr(folder, attribute, b"y")
        except OSError:  # no folder could be made where one was deleted
            raise OSError("this kernel's tmpfs has no attributes of users, as those since Linux 6.6 have") from None
        os.chdir(folder)
        os.mkdir(layers.root)
        layers.lay("/")
        for place in (os.path.expanduser("~"), tempfile.gettempdir(), cwd):
            if os.access(place, os.W_OK):
                layers.open_up(place)
        kernel.mount(f"/proc/self/fd/{real}", layers.seen(folder), flags=kernel.BIND)
        for place in sorted(kept):
            layers.keep(place)
        layers.keep_sockets()
        if os.access(cwd, os.W_OK) and not layers.takes_files(cwd):
            raise OSError("the working folder cannot have an overlay: its file system, or another owner, is against it")
        namespaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in kinds]
        socket.send_fds(line, [b"made"], [*namespaces, os.open(layers.root, os.O_PATH)])
    except BaseException as error:
        with suppress(OSError):
            line.send(kernel.in_words(error).encode(errors="replace")[:4000])
    finally:
        os._exit(0)


def _isolate(line: socket.socket) -> tuple[tuple[str, ...], str, str]:
    """Go into new namespaces: their kinds, the attribute that overlays need, and their options.

    Root may mount without a user namespace, and so keeps all rights to files and to locked memory. Only then can an
    overlay remember that a folder was renamed.
    """
    try:
        kernel.unshare(kernel.NEW_MOUNTS)
    except PermissionError:
        kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNTS)
        line.send(b"map")
        line.recv(16)
        return ("user", "mnt"), "user.overlay.try", "userxattr"
    return ("mnt",), "trusted.overlay.try", "redirect_dir=on"


class _Layers:
    """Builds the view of all mounts below `root`, in the memory of a tmpfs that is mounted on `folder`."""

    def __init__(self, folder: str, options: str) -> None:
        self.root = f"{folder}/root"
        self._folder, self._options = folder, options
        self._mounts = _mounts()
        self._numbers = itertools.count()
        self._laid: set[str] = set()

    def seen(self, place: str) -> str:
        return self.root + place

    def lay(self, place: str) -> None:
        """Let `place`, a folder that is there in the view, show what is there, and take what is written.

        In a user namespace nobody may look below the mounts that were there before, so a folder with any below it can
        be no lower layer: it is rebuilt from what lies in it. What cannot be a layer for another reason is read-only.
        """
        self._laid.add(place)
        below = self._below(place)
        if place in _AS_THEY_ARE:
            self._bind(place)
            return
        if self._mounts.get(place) == "autofs" or os.statvfs(place).f_flag & os.ST_RDONLY:
            self._bind(place)
        elif not os.path.isdir(place) or not self._overlay(place):
            if below and (names := self._names(place)) is not None:
                self._rebuild(place, names)
                return
            self._bind_read_only(place)
        for each in below:
            if os.path.exists(each):  # no other mount hides it
                self.lay(each)

    def keep(self, place: str) -> None:
        """Let `place` be the real one in the view."""
        os.makedirs(self.seen(place), exist_ok=True)
        self._bind(place)

    def takes_files(self, place: str) -> bool:
        """Whether something can be written to `place` in the view."""
        try:
            os.rmdir(tempfile.mkdtemp(dir=self.seen(place)))
        except OSError:
            return False
        return True

    def open_up(self, place: str) -> None:
        """Let it take files, if its owner may.

        To write in a folder, an overlay first makes a copy of that folder and of all above it, which fails for those of
        users and groups that are not known in the user namespace: such as a root-owned one of which this user has a
        part. The topmost folder of an overlay needs no copy. So it is too for a folder with too much in it to rebuild.
        """
        above = [place, *map(str, Path(place).parents)]
        own = list(itertools.takewhile(lambda each: _is_own(each) and each not in self._laid, above))
        while own and not self.takes_files(place):
            self.lay(own.pop())

    def keep_sockets(self) -> None:
        """Through an overlay nobody reaches the process that listens at a socket, as sssd's, which knows users."""
        with open("/proc/net/unix", errors="surrogateescape") as file:
            paths = {line.rstrip("\n").partition(" /")[2] for line in file}
        for path in (f"/{path}" for path in paths if path):
            with suppress(OSError):
                if stat.S_ISSOCK(os.lstat(self.seen(path)).st_mode):
                    self._bind(path)

    def _below(self, place: str) -> list[str]:
        """The mounts below `place` that are below no other one."""
        inside = sorted(each for each in self._mounts if each != place and is_in(each, place))
        return [each for each in inside if not any(other != each and is_in(each, other) for other in inside)]

    def _bind(self, place: str) -> None:
        kernel.mount(place, self.seen(place), flags=kernel.BIND | kernel.RECURSIVE)

    def _bind_read_only(self, place: str) -> None:
        self._bind(place)
        try:
            kernel.make_read_only(self.seen(place))
        except OSError as error:  # nobody may take it for a file that is not there
            raise RuntimeError(f"{place} would stay writable ({error})") from error

    def _overlay(self, place: str) -> bool:
        """Whether `place` can be the lower layer of an overlay."""
        number = next(self._numbers)
        for name in ("upper", "work"):
            os.makedirs(f"{number}/{name}")
        _make_like(place, f"{number}/upper")
        lower = os.open(place, os.O_PATH)
        layers = f"lowerdir=/proc/self/fd/{lower},upperdir={number}/upper,workdir={number}/work"
        try:
            kernel.mount("overlay", self.seen(place), "overlay", 0, f"{layers},{self._options}")
        except OSError:
            return False
        finally:
            os.close(lower)
        return True

    def _names(self, place: str) -> list[str] | None:
        """What lies in a folder; None for too much. Of one that cannot be listed, only mounts are known."""
        try:
            names = os.listdir(place)
        except PermissionError:
            names = [os.path.relpath(each, place).partition("/")[0] for each in self._mounts if is_in(each, place)]
        return sorted(set(names)) if len(names) <= _MOST_ENTRIES else None

    def _rebuild(self, place: str, names: Sequence[str]) -> None:
        """Show a folder of its own with what `place` has: small files as copies, and large ones read-only."""
        copy = f"{self._folder}/{next(self._numbers)}"
        os.mkdir(copy)
        kernel.mount(copy, self.seen(place), flags=kernel.BIND)
        for name in names:
            with suppress(FileNotFoundError, PermissionError):  # it is gone, or nobody could read it either
                self._show(os.path.join(place, name))
        _make_like(place, copy)

    def _show(self, path: str) -> None:
        kind, seen = os.lstat(path), self.seen(path)
        if stat.S_ISLNK(kind.st_mode):
            os.symlink(os.readlink(path), seen)
        elif stat.S_ISDIR(kind.st_mode):
            os.mkdir(seen)
            self.lay(path)
        elif stat.S_ISREG(kind.st_mode) and kind.st_size <= _SMALL and path not in self._mounts:
            shutil.copy2(path, seen)
        else:
            os.close(os.open(seen, os.O_CREAT, 0o600))
            self._bind_read_only(path)


def _mounts() -> dict[str, str]:
    """The kinds of file systems by where they are mounted."""
    found = {}
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            place = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split(" ")[4])
            found[place] = after.split(" ")[0]
    return found


def _is_own(place: str) -> bool:
    found = os.stat(place)
    return (found.st_uid, found.st_gid) == (os.geteuid(), os.getegid())


def _make_like(place: str, new: str) -> None:
    """Give the folder `new` owner and mode of `place`, or at least keep it from being written if that may not be."""
    mode = stat.S_IMODE(os.stat(place).st_mode)
    with suppress(OSError):  # somebody who is not known in the user namespace
        os.chown(new, os.stat(place).st_uid, os.stat(place).st_gid)
    os.chmod(new, mode if os.access(place, os.W_OK) else mode & ~0o222)
