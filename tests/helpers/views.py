"""Views of a user's files, in which a test runs code: at each level of protection, as root and as another user."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ladder
from helpers.scripts import MISBEHAVING

HARMS = MISBEHAVING / "harms.py"
_FUNCTIONS = runpy.run_path(str(HARMS), run_name="harms")
folder_to_harm: Callable[[Path, Path], None] = _FUNCTIONS["folder_to_harm"]
USER = 1234
WAYS = {
    "overlay": [],
    "overlay in a user namespace": ["setpriv", "--bounding-set", "-sys_admin"],
    "overlay of a user": ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"],
    "landlock": [],
    "landlock of a user": ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"],
}
PROGRAM = """
import json, os, runpy, sys
from ladder.trial.protection.level import Protection, remark

def say(what):
    print(json.dumps(what), flush=True)

def inside(code):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)
    protection.enter(view)
    try:
        exec(code)
    except OSError as error:
        say({"error": f"{type(error).__name__}: {error}", "remark": remark(error)})
    finally:
        os._exit(0)

protection = Protection()
for _ in range(int(sys.argv[2])):
    view = protection.view(sys.argv[1], ())
    for code in sys.argv[3:]:
        inside(code)
    view.close()
say({"level": protection.level})
"""


class Place:
    """Folders of a user, and a way to run code in views, from the working folder `cwd`."""

    def __init__(self, folder: Path, way: str) -> None:
        self.level = way.partition(" ")[0]
        self.harmed = [folder / name for name in ("cwd", "home", "tmp", "cwd/deep/er")]
        self.cwd, self.home, self.tmp, _ = self.harmed
        self.cache, self._trial = folder / "home" / ".cache", folder / "trial"
        for each in self.harmed:
            each.mkdir(parents=True)
            (folder / f"beside {each.name}").mkdir()
            folder_to_harm(each, folder / f"beside {each.name}")
        self._trial.mkdir()
        self._command = [*WAYS[way], sys.executable]
        self.uid = USER if way.endswith("of a user") else os.geteuid()
        if self.uid == USER:
            self.give(folder)
            self._command[-1] = _interpreter_of_a_user(WAYS[way])
        elif WAYS[way]:
            _require_setpriv()

    def give(self, folder: Path) -> None:
        """Let the folder and all in it be the user's."""
        for each in (folder, *folder.rglob("*")):
            os.chown(each, self.uid, self.uid, follow_symlinks=False)

    def harm(self, views: int = 1) -> list[Any]:
        """As `run`, with all that the script does to the harmed folders."""
        return self.run(f"runpy.run_path({str(HARMS)!r}, run_name='harms')['harm_all']()", views=views)

    def run(self, *code: str, views: int = 1, **environment: str) -> list[Any]:
        """Run each `code` in a process of its own, one after another in the same view; what they and we print."""
        done = subprocess.run(
            [*self._command, "-c", PROGRAM, str(self._trial), str(views), *code],
            cwd=self.cwd,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(Path(ladder.__file__).parents[1]),
                "HOME": str(self.home),
                "TMPDIR": str(self.tmp),
                "LADDER_PROTECT": self.level,
                "HARMED": "\n".join(map(str, self.harmed)),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        if "Operation not permitted" in done.stderr or "Landlock: " in done.stderr:
            pytest.skip(f"this machine has no such level: {done.stderr.splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        *said, last = [json.loads(line) for line in done.stdout.splitlines()]
        assert last == {"level": self.level}
        assert list(self._trial.iterdir()) == []
        return said


def _require_setpriv() -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can be another user, with setpriv")


def _interpreter_of_a_user(way: list[str]) -> str:
    _require_setpriv()
    for python in (sys.executable, "/usr/bin/python3"):
        command = [*way, python, "-c", "import ladder.trial.protection.level"]
        done = subprocess.run(command, cwd=Path(ladder.__file__).parents[1], capture_output=True, check=False)
        if done.returncode == 0:
            return python
    pytest.skip("another user cannot run Python here")


def trees(*folders: Path, modes: bool) -> dict[str, tuple[object, ...]]:
    """Every name in the folders, with its kind, its content and, with `modes`, its rights."""
    found: dict[str, tuple[object, ...]] = {}
    for folder in folders:
        for each in (folder, *sorted(folder.rglob("*"))):
            mode = each.lstat().st_mode
            content = os.readlink(each) if each.is_symlink() else each.read_bytes() if each.is_file() else ""
            found[str(each)] = (stat.S_IFMT(mode), content, stat.S_IMODE(mode) if modes else 0)
    return found
