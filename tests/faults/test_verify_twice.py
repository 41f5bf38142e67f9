"""A verification that runs is not taken for the leftover of one that was killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import wait_until

from ladder.errors import EnvironmentFaultError
from ladder.tuning.verification import _alone_in

pytestmark = pytest.mark.timeout(900)  # the first test waits for the small tune, which a busy machine disturbs
VERIFY = [sys.executable, "-m", "ladder.cli.main", "verify"]


def start_verification(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*VERIFY, *options], cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def trains(folder: Path) -> bool:
    digest = json.loads((folder / "best_config.json").read_text())["ladder"]["digest"]  # other tests verify other files
    files = folder.glob(f"ladder-runs/verify-{digest}/trials/*/rank1.jsonl")
    return any(b'"phase":"measure"' in file.read_bytes() for file in files)


@pytest.mark.night  # beside the next test, in which the same folder is held
def test_a_second_verification_of_a_file_is_refused_and_leaves_the_first_one_alone(small_tune: Path) -> None:
    first = start_verification(small_tune, "--minutes", "0.25", "--tolerance", "0.99")
    wait_until(lambda: trains(small_tune) or first.poll() is not None, 60)
    second = start_verification(small_tune)
    _, said = second.communicate(timeout=60)
    assert second.returncode == 4, said
    assert f"Another verification of 'best_config.json' is running (pid {first.pid}); wait for it." in said
    assert first.communicate(timeout=120)[1].count("ended") == 0
    assert first.returncode == 0


def test_a_folder_that_a_killed_verification_held_is_free_again(tmp_path: Path) -> None:
    hold = "import sys, time; from pathlib import Path; from ladder.tuning.verification import _alone_in\n"
    hold += "with _alone_in(Path(sys.argv[1]), Path('a.json')):\n    print('held', flush=True)\n    time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(EnvironmentFaultError, match=rf"Another verification of 'b.json' .*\(pid {holder.pid}\)"),
        _alone_in(tmp_path, Path("b.json")),
    ):
        pass
    holder.kill()
    holder.communicate()
    with _alone_in(tmp_path, Path("b.json")):
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_where_folders_cannot_be_locked_a_verification_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(EnvironmentFaultError, match="cannot be locked"), _alone_in(tmp_path, Path("a.json")):
        pass
