"""What a process can do to its user's files in a view: at each level, as root and as another user, without training."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.views import HARMS, WAYS, Place, trees


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


def test_whatever_a_script_does_to_its_users_files_they_stay_as_they_were(place: Place) -> None:
    user = place.cwd.parent
    place.run("pass")  # makes the folder for caches
    before = trees(user, modes=place.level == "overlay")
    assert place.harm(views=2) == []
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
