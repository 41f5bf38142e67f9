"""Real trials of scripts that harm their user's files, and views of users with unusual mounts."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from faults.mounts import make_read_only, mounted
from helpers import Finished, ladder
from helpers.scripts import MISBEHAVING, folder_with_inputs
from helpers.views import HARMS, Place, folder_to_harm, trees

pytest.importorskip("datasets")  # the scripts read their data with it
HERE = ("--gpus", "2", "--gpu-memory", "3GiB", "--rung", "zero2")


class User:
    """A working folder with inputs, a home and a folder for temporary files, each with what a script may harm."""

    def __init__(self, folder: Path, inputs: Path, patch: pytest.MonkeyPatch) -> None:
        self.cwd, self.home, self.tmp = (folder / name for name in ("work", "home", "tmp"))
        folder_with_inputs(self.cwd, inputs)
        self._harmed = [self.cwd / "harmed", self.home, self.tmp]
        patch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        patch.setenv("HOME", str(self.home))
        patch.setenv("TMPDIR", str(self.tmp))
        patch.setenv("HARMED", "\n".join(map(str, self._harmed)))
        (folder / "elsewhere").mkdir()
        for each in self._harmed:
            each.mkdir()
            (folder / "elsewhere" / each.name).mkdir()
            folder_to_harm(each, folder / "elsewhere" / each.name)
        self._own = [self.cwd, self.home, self.tmp, folder / "elsewhere"]

    def files(self, modes: bool) -> dict[str, tuple[object, ...]]:
        """What is the user's: neither ladder's nor a cache's."""
        ours = ("ladder-runs", "best_config.", "std", "torchinductor")
        return {
            name: what[::2] if Path(name) in (self.cwd, self.tmp) else what
            for name, what in trees(*self._own, modes=modes).items()
            if not any(part.startswith(ours) for part in Path(name).parts)
        }

    def look(self, script: str, *arguments: str) -> Finished:
        return ladder("plan", *HERE[:4], "--", f"{MISBEHAVING}/{script}", *arguments, folder=self.cwd)


@pytest.fixture
def user(tmp_path: Path, script_inputs: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    return User(tmp_path, script_inputs, monkeypatch)


# Without a tune, test_protection.py has each level.
@pytest.mark.parametrize("level", ["overlay", pytest.param("landlock", marks=pytest.mark.night)])
def test_a_script_that_harms_its_users_files_before_in_and_after_its_training_harms_none(
    level: str, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LADDER_PROTECT", level)
    modes = level == "overlay"  # Landlock does not know of them
    before = user.files(modes)
    options = ["--micro-batch", "4", "--documented"]
    done = ladder("tune", "--gpus", "0", *HERE[2:], *options, "--", str(HARMS), str(user.tmp), folder=user.cwd)
    if "does not work here" in done.errors:
        pytest.skip(done.errors)
    assert done.status == 0, done.errors
    assert done.num_left == 0
    assert user.files(modes) == before
    assert len(before) > 100
    assert list((user.cwd / "ladder-runs").rglob("scratch")) == []


def test_where_the_kernel_holds_nothing_the_first_lines_say_so(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LADDER_PROTECT", "none")
    done = user.look("harms.py", str(user.tmp))
    second = done.errors.splitlines()[1]
    assert second.startswith("Warning: nothing here keeps your files from the script.")
    assert (user.home / "kept").read_text() == "harmed"


def test_a_level_that_is_none_is_refused(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LADDER_PROTECT", "bubblewrap")
    done = user.look("harms.py", str(user.tmp))
    assert done.status == 4
    assert "LADDER_PROTECT=bubblewrap is none of overlay, landlock, none" in done.errors
    assert (user.home / "kept").read_text() != "harmed"


@pytest.mark.parametrize(
    ("level", "target", "error", "why"),
    [
        ("overlay", "full", "OSError: [Errno 28] No space left on device", "stays in memory, 0.0 GiB of it at most"),
        (
            "landlock",
            "{home}/kept",
            "PermissionError: [Errno 13] Permission denied: '{home}/kept'",
            "may write only in",
        ),
    ],
)
def test_a_script_that_writes_what_it_may_not_is_told_in_one_sentence(
    level: str, target: str, error: str, why: str, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LADDER_PROTECT", level)
    monkeypatch.setenv("LADDER_PROTECT_BYTES", str(8 << 20))
    before = user.files(modes=False)
    done = user.look("fills_disk.py", target.format(home=user.home), "16")
    if "does not work here" in done.errors:
        pytest.skip(done.errors)
    assert done.status == 2
    (sentence,) = [line for line in done.errors.splitlines() if line.startswith("ladder: ")]
    assert f"cannot be tuned: {error.format(home=user.home)}: " in sentence
    assert why in sentence
    for log in user.tmp.glob("ladder-look-*.log"):
        log.unlink()
    assert user.files(modes=False) == before


# Mounts


@pytest.fixture(params=["overlay", "overlay in a user namespace", "overlay of a user"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="ladder test ") as name:
        os.chmod(name, 0o711)
        yield Place(Path(name) / "of the user", request.param)


def test_mounts_inside_the_users_folders_are_held_too(place: Place) -> None:
    with ExitStack() as stack:
        for folder in place.harmed:
            inside = stack.enter_context(mounted(folder / "mounted here", "tmpfs", f"mode=777,uid={place.uid}"))
            (inside / "below").mkdir()
            folder_to_harm(inside / "below", inside)
            place.give(inside)
        one = place.home / "one file"
        one.write_text("of the user")
        subprocess.run(["mount", "--bind", str(place.cwd / "kept"), str(one)], check=True)
        stack.callback(subprocess.run, ["umount", str(one)], check=True)
        place.harmed += [each / "mounted here" / "below" for each in place.harmed]
        place.run("pass")
        before = trees(place.cwd.parent, modes=True)
        assert place.harm() == []
        assert trees(place.cwd.parent, modes=True) == before
        new = "open('new', 'w').close(); open('mounted here/new', 'w').close(); say(open('kept').read())"
        assert place.run(new) == ["kept of the user"]
        assert trees(place.cwd.parent, modes=True) == before


def test_a_file_system_that_is_read_only_stays_so(place: Place) -> None:
    with mounted(place.cwd / "data", "tmpfs") as data:
        (data / "file").write_text("of the user")
        make_read_only(data)
        code = "say(open('data/file').read()); open('data/new', 'w')"
        text, refused = place.run(code)
        assert text == "of the user"
        assert refused["error"].startswith("OSError: [Errno 30] Read-only file system: 'data/new'")


def test_a_working_folder_that_is_read_only_does_no_harm(place: Place) -> None:
    with mounted(place.cwd, "tmpfs") as cwd:
        (cwd / "file").write_text("of the user")
        make_read_only(cwd)
        assert place.run("say(open('file').read())") == ["of the user"]


def test_a_full_folder_above_with_a_mount_below_it_closes_no_folder_of_the_user(place: Place) -> None:
    for number in range(3001):  # more than are rebuilt
        (place.cwd.parent / str(number)).touch()
    with mounted(place.cwd / "data", "tmpfs"):
        code = "[open(f'{each}/new', 'w').close() for each in (os.getcwd(), os.environ['HOME'], os.environ['TMPDIR'])]"
        assert place.run(f"{code}; say(open('kept').read())") == ["kept of the user"]
    assert [each for each in place.harmed if (each / "new").exists()] == []
