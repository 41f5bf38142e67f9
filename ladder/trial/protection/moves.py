"""Moves that the user's own file system can make in one step, and that in a trial cross from one layer to another."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from typing import Any

from ladder.trial.wrapping import wrap


def move_between_file_systems() -> None:
    """From now on os.rename and os.replace copy what the kernel does not move, as the command `mv` does.

    An overlay in a user namespace moves no folder of the user's, and the first version of Landlock moves nothing to
    another folder.
    """

    def moved(own: Any, source: Any, target: Any, **descriptors: Any) -> None:
        try:
            own(source, target, **descriptors)
        except OSError as error:
            if error.errno != errno.EXDEV or descriptors:
                raise
            _move(own, os.fsdecode(source), os.fsdecode(target))

    wrap(os, "rename", moved)
    wrap(os, "replace", moved)


def _move(own: Any, source: str, target: str) -> None:
    """Beside the target first, so that it is there as a whole or not at all."""
    is_folder = os.path.isdir(source) and not os.path.islink(source)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.abspath(target))) as beside:
        copy = os.path.join(beside, "copy")
        if is_folder:
            shutil.copytree(source, copy, symlinks=True)
        else:
            shutil.copy2(source, copy, follow_symlinks=False)
        own(copy, target)
    if is_folder:
        shutil.rmtree(source)
    else:
        os.unlink(source)
