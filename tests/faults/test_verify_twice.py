"""A verification that runs is not taken for the leftover of one that was killed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ladder.errors import EnvironmentFaultError
from ladder.tuning.verification import _alone_in


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
