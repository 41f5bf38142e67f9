"""Keeps the trials of a user's script from the user's files, in the best way that the kernel allows here.

    python -m ladder.trial.protection.level

prints which one that is, as JSON, and why a better one does not work.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Sequence
from typing import NoReturn, Protocol

from ladder.events.protection import ASKED, LEVELS, ROOM, Level
from ladder.trial.protection.caches import caches, is_in
from ladder.trial.protection.kernel import in_words
from ladder.trial.protection.landlock import LandlockView
from ladder.trial.protection.moves import move_between_file_systems
from ladder.trial.protection.overlay import OverlayView

_ROOM = 1 << 30
"""Bytes that overlays may take where no tune says how many. Chosen: plenty for the check that they work."""


class View(Protocol):
    """What one trial may write to. It is made in the server, and each rank enters it."""

    def enter(self) -> None: ...

    def close(self) -> None: ...


class _OpenView:
    def enter(self) -> None:
        pass

    def close(self) -> None:
        pass


class Protection:
    """The level that works here. It is chosen with the first view, and no later view has less."""

    def __init__(self) -> None:
        self.level: Level | None = None
        self.why = ""
        """Why it is no better one; empty for the best."""

    def view(self, folder: str, real: Sequence[str]) -> View:
        """A view for one trial, in which `folder`, the folders in `real` and caches are the real ones.

        OSError if there is none.
        """
        folder = os.path.realpath(folder)
        places = {*caches(), *(os.path.realpath(each) for each in real)}
        kept = sorted(each for each in places if not any(is_in(each, other) for other in {*places, folder} - {each}))
        if self.level is not None:
            return _made(self.level, folder, kept)
        asked = os.environ.get(ASKED)
        reasons = []
        for level in [each for each in LEVELS if asked in ("", None, each)]:
            try:
                view = _made(level, folder, kept)
                if level != "none":
                    _require_that_it_holds(view)
            except OSError as error:
                reasons.append(f"{level}: {in_words(error)}")
                continue
            self.level, self.why = level, "; ".join(reasons)
            return view
        raise OSError("; ".join(reasons) or f"{ASKED}={asked} is none of {', '.join(LEVELS)}")

    def enter(self, view: View) -> None:
        """This process, a rank, sees `view` from now on."""
        view.enter()
        assert self.level is not None
        _entered.append(self.level)
        if self.level != "none":
            move_between_file_systems()


_entered: list[Level] = []
"""That of the view that this process entered, once it did."""


def entered() -> Level:
    """What keeps the user's files from this process."""
    return _entered[0] if _entered else "none"


def remark(error: BaseException | None) -> str:
    """Words for an error that a script has because of its protection, or for one that comes of it; usually none."""
    level = entered()
    while error is not None:
        if isinstance(error, OSError) and (said := _said_of(level, error)):
            return f"{said}. Guard what writes it, or set {ASKED}=none, and trials really write it"
        error = error.__cause__ or error.__context__
    return ""


def _said_of(level: Level, error: OSError) -> str:
    if level == "landlock" and error.errno == errno.EACCES and _is_writable(error.filename):
        return "a trial may write only in a copy of its working folder and in caches"
    if level == "overlay" and error.errno == errno.ENOSPC:
        room = f"{_room() / (1 << 30):.1f} GiB"
        return f"what a trial writes outside its output folder and caches stays in memory, {room} of it at most"
    if level == "overlay" and error.errno == errno.EROFS:
        return "a trial may not write in this file system"
    if level == "overlay" and error.errno == errno.EOVERFLOW:
        return "a trial cannot change what belongs to another user or group"
    return ""


def _is_writable(path: str | bytes | None) -> bool:
    """Whether this user may write there without Landlock, which os.access knows nothing of."""
    there = os.path.abspath(os.fsdecode(path or ""))
    return os.access(there if os.path.lexists(there) else os.path.dirname(there), os.W_OK)


def _made(level: Level, folder: str, kept: Sequence[str]) -> View:
    if level == "overlay":
        return OverlayView(folder, kept, _room())
    return LandlockView(folder, kept) if level == "landlock" else _OpenView()


def _room() -> int:
    """Bytes that overlays may take."""
    return int(os.environ.get(ROOM) or _ROOM)


def _require_that_it_holds(view: View) -> None:
    """OSError if a process in the view really writes a file that it must not."""
    with tempfile.TemporaryDirectory() as elsewhere:
        pid = os.fork()
        if pid == 0:
            _write_into(elsewhere, view)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status or os.listdir(elsewhere):
            view.close()
            raise OSError("it does not hold" if status == 0 else "it cannot be entered")


def _write_into(folder: str, view: View) -> NoReturn:
    """In a process of its own, which ends."""
    status = 1
    try:
        view.enter()
        status = 0
        with open(os.path.join(folder, "written"), "w"):
            pass
    finally:
        os._exit(status)


def main() -> None:
    """Print the level that works here."""
    found = Protection()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found.view(folder, ()).close()
        except OSError as error:
            found.why = str(error)
    print(json.dumps({"level": found.level, "why": found.why}))


if __name__ == "__main__":
    main()
