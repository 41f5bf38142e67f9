"""What a process can do to its user's files in a view: at each level, as root and as another user, without training."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.scripts import MISBEHAVING

import ladder

HARMS = MISBEHAVING / "harms.py"
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
        harms = runpy.run_path(str(HARMS), run_name="harms")
        for each in self.harmed:
            each.mkdir(parents=True)
            (folder / f"beside {each.name}").mkdir()
            harms["folder_to_harm"](each, folder / f"beside {each.name}")
        self._trial.mkdir()
        self._command = [*WAYS[way], sys.executable]
        if "user" in way.split()[-1:]:
            _give(folder, USER)
            self._command[-1] = _interpreter_of_a_user(WAYS[way])
        elif WAYS[way]:
            _require_setpriv()

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


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where other users can come, unlike to pytest's own folders."""
    with tempfile.TemporaryDirectory(prefix='it\'s, a: "place" é') as name:
        os.chmod(name, 0o711)
        yield Path(name) / "of the user"


@pytest.fixture(params=list(WAYS))
def place(request: pytest.FixtureRequest, folder: Path) -> Place:
    return Place(folder, request.param)


@pytest.fixture(params=[way for way in WAYS if way.startswith("overlay")])
def overlaid(request: pytest.FixtureRequest, folder: Path) -> Place:
    return Place(folder, request.param)


@pytest.fixture(params=[way for way in WAYS if way.startswith("landlock")])
def locked(request: pytest.FixtureRequest, folder: Path) -> Place:
    return Place(folder, request.param)


def _give(folder: Path, user: int) -> None:
    """Let the folder and all in it be the user's."""
    for each in (folder, *folder.rglob("*")):
        os.chown(each, user, user, follow_symlinks=False)


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


def test_whatever_a_script_does_to_its_users_files_they_stay_as_they_were(place: Place) -> None:
    user = place.cwd.parent
    place.run("pass")  # makes the folder for caches
    before = trees(user, modes=place.level == "overlay")
    code = f"runpy.run_path({str(HARMS)!r}, run_name='harms')['harm_all']()"
    assert place.run(code, views=2) == []
    assert trees(user, modes=place.level == "overlay") == before
    assert len(before) > 80


def test_in_an_overlay_a_script_sees_all_that_it_has_done_as_if_it_were_real(overlaid: Place) -> None:
    told = f"""
runpy.run_path({str(HARMS)!r}, run_name='harms')['harm_all']()
for folder in os.environ['HARMED'].splitlines():
    names = sorted(os.listdir(folder))
    texts = [open(os.path.join(folder, name)).read() for name in ('kept', 'truncated', 'appended', 'link')]
    say({{'names': names, 'texts': texts, 'tree': os.listdir(folder + '/tree')}})
"""
    for said in overlaid.run(told):
        assert {"renamed-away", "tree-moved"} < set(said["names"])
        gone = {"deleted", "renamed", "by_child", "tree-by-child", "tree-to-move", "new"}
        assert not gone & set(said["names"])
        assert said["texts"] == ["harmed", "tru", "harmed", "harmed"]
        assert said["tree"] == []


def test_ranks_of_a_trial_share_what_they_write_and_the_next_trial_does_not_see_it(place: Place) -> None:
    write = "say(os.path.exists('shared')); open('shared', 'w').close()"
    read = "say(os.path.exists('shared'))"
    assert place.run(write, read, views=2) == [False, True, False, True]


def test_what_is_written_to_caches_is_really_there(place: Place) -> None:
    write = (
        "open(os.path.expanduser('~/.cache/new'), 'w').close(); open(os.environ['HF_HUB_CACHE'] + '/new', 'w').close()"
    )
    assert place.run(write, HF_HUB_CACHE=str(place.home / "models" / "hub")) == []
    assert (place.cache / "new").is_file()
    assert (place.home / "models" / "hub" / "new").is_file()


def test_a_cache_that_holds_the_working_folder_is_not_left_open(place: Place) -> None:
    place.run("open('new', 'w').close()", XDG_CACHE_HOME=str(place.cwd.parent))
    assert not (place.cwd / "new").exists()


def test_temporary_files_can_be_written_and_are_gone_afterwards(place: Place) -> None:
    before = sorted(each for each in place.tmp.iterdir() if "inductor" not in each.name)
    said = place.run("import tempfile; say(tempfile.mkdtemp()); open(tempfile.mkstemp()[1], 'w').close()")
    assert not Path(str(said[0])).exists()
    assert sorted(each for each in place.tmp.iterdir() if "inductor" not in each.name) == before


def test_a_refused_write_names_its_path_and_what_to_do(locked: Place) -> None:
    (said,) = locked.run("open(os.path.expanduser('~/kept'), 'w')")
    assert said["error"] == f"PermissionError: [Errno 13] Permission denied: {str(locked.home / 'kept')!r}"
    assert said["remark"].startswith("a trial may write only in a copy of its working folder and in caches. Guard")
    (said,) = locked.run("open('no/such/file')")
    assert said["remark"] == ""


def test_large_files_in_the_copy_of_the_working_folder_can_be_read_and_replaced_but_not_written(locked: Place) -> None:
    (locked.cwd / "large").write_bytes(bytes(2 << 20))
    (locked.cwd / "to-large").symlink_to("large")
    os.chmod(locked.cwd / "large", 0o666)
    (said,) = locked.run("say(os.path.getsize('to-large')); os.remove('large'); open('large', 'w').close()")
    assert said == 2 << 20
    (said,) = locked.run("open('large', 'a')")
    assert "Permission denied: 'large'" in said["error"]
    assert (locked.cwd / "large").stat().st_size == 2 << 20


def test_a_script_that_fills_its_overlay_is_told_so_and_the_disk_is_not_touched(overlaid: Place) -> None:
    (said,) = overlaid.run("open('huge', 'wb').write(bytes(3 << 20))", LADDER_PROTECT_BYTES=str(2 << 20))
    assert said["error"] == "OSError: [Errno 28] No space left on device"
    assert "stays in memory, 0.0 GiB of it at most" in said["remark"]
    assert not (overlaid.cwd / "huge").exists()


def test_a_process_that_is_left_behind_harms_nothing_and_no_mount_is_left(overlaid: Place) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    before = trees(overlaid.cwd, modes=True)
    later = f"pid = os.fork()\nif pid == 0:\n    import time; time.sleep(1); open({str(overlaid.cwd / 'late')!r}, 'w')"
    overlaid.run(f"{later}; open('/dev/shm/ladder-late', 'w').close()")
    late = Path("/dev/shm/ladder-late")
    for _ in range(100):
        if late.exists():
            break
        subprocess.run(["sleep", "0.1"], check=True)
    late.unlink()
    assert trees(overlaid.cwd, modes=True) == before
    assert Path("/proc/self/mountinfo").read_text() == mounts


def test_a_working_folder_that_nobody_may_write_stays_so_in_a_view(folder: Path) -> None:
    place = Place(folder, "overlay of a user")
    os.chown(place.cwd, 0, 0)
    (said,) = place.run("open('new', 'w')")
    assert said["error"] == "PermissionError: [Errno 13] Permission denied: 'new'"


@pytest.mark.parametrize("way", ["overlay", "overlay of a user"])
def test_in_a_view_nobody_has_the_right_to_mount(way: str, folder: Path) -> None:
    place = Place(folder, way)
    call = "import ctypes; say(ctypes.CDLL(None).umount2(b'/dev/shm', 2))"
    program = "import subprocess; say(subprocess.run(['umount', '-l', '/dev/shm'], stderr=-3).returncode > 0)"
    assert place.run(call, program) == [-1, True]
