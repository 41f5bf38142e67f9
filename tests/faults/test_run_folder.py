"""The run folder loses nothing: torn tails are dropped, damage is refused with a copy kept, full disks are survived."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.mounts import fill, make_read_only, mounted
from helpers import make_candidate, make_measurement, make_record

from ladder.errors import EnvironmentFaultError, LadderError
from ladder.events.outcome import Record
from ladder.runs.history import History
from ladder.tuning.run import disk_faults

FACTS: dict[str, Any] = {"model": "tiny-llama", "world size": 2}
CANDIDATES = [make_candidate(micro_batch=size, accumulation=8 // size) for size in (1, 2, 4)]
BY_KEY = {candidate.key: candidate for candidate in CANDIDATES}
RECORDS = [
    make_record(CANDIDATES[0], measurement=make_measurement(losses=(9.0, 8.5))),
    make_record(CANDIDATES[1], "gpu_oom"),
    make_record(CANDIDATES[2], trial="0002", tokens_per_second=123.25),
]


def opened(folder: Path, fingerprint: str = "abc") -> History:
    return History(folder, fingerprint, FACTS)


def records_in(folder: Path) -> list[Record]:
    with opened(folder) as history:
        return history.records


def write_all(folder: Path) -> Path:
    with opened(folder) as history:
        for record in RECORDS:
            history.add([record], BY_KEY, {"measure": 2.0})
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with all RECORDS, to be copied and never opened."""
    return write_all(tmp_path_factory.mktemp("history") / "run")


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder where a thousand small files take no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


def refused(folder: Path, kind: type[LadderError] = EnvironmentFaultError, *, advice: str = "--run-dir") -> str:
    """The one sentence with which `folder` is refused, after a look that its history is as it was."""
    before = (folder / "journal.log").read_bytes()
    with pytest.raises(kind) as refusal:
        opened(folder)
    assert (folder / "journal.log").read_bytes() == before
    sentence = str(refusal.value)
    assert sentence.isprintable()
    assert advice in sentence
    return sentence


# Damage


def test_a_byte_changed_anywhere_in_the_middle_is_refused_and_left_as_it_is(written: Path, in_memory: Path) -> None:
    whole = (written / "journal.log").read_bytes()
    start_of_last = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    dice = random.Random(5)
    folder = in_memory / "run"
    for _ in range(150):
        where = dice.randrange(start_of_last)
        damaged = bytearray(whole)
        damaged[where] ^= 1 << dice.randrange(8)
        folder.mkdir(mode=0o700)
        (folder / "journal.log").write_bytes(damaged)
        sentence = refused(folder)
        assert "is damaged (line " in sentence, where
        assert "nothing was changed" in sentence
        assert (folder / "journal.log").read_bytes() == damaged
        shutil.rmtree(folder)


def lose_a_line(lines: list[bytes]) -> list[bytes]:
    return lines[:2] + lines[3:]


def swap_two_lines(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], lines[3], lines[2], *lines[4:]]


def overwrite_a_block(lines: list[bytes]) -> list[bytes]:
    text = b"".join(lines)
    return [text[:200], random.Random(1).randbytes(300), text[500:]]


@pytest.mark.parametrize("damage", [lose_a_line, swap_two_lines, overwrite_a_block])
def test_larger_damage_is_refused_too(copied: Path, damage: Callable[[list[bytes]], list[bytes]]) -> None:
    journal = copied / "journal.log"
    before = journal.read_bytes()
    journal.write_bytes(b"".join(damage(before.splitlines(keepends=True))))
    assert journal.read_bytes() != before
    assert "is damaged" in refused(copied)


def test_what_optuna_dashboard_notes_down_is_no_damage(copied: Path) -> None:
    with (copied / "journal.log").open("a") as journal:
        journal.write(json.dumps({"op_code": 3, "worker_id": "x", "study_id": 0, "system_attr": {"note": "hi"}}) + "\n")
    assert records_in(copied) == RECORDS


# Disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted(tmp_path / "disk", "tmpfs", "size=1m") as folder:
        yield folder


def test_a_read_only_disk_is_the_environments_fault_and_the_history_stays(disk: Path) -> None:
    write_all(disk / "run")
    make_read_only(disk)
    with pytest.raises(OSError, match="Read-only file system"):
        (disk / "run" / "probe").touch()
    assert "cannot be written (Read-only file system)" in refused(disk / "run")


def test_when_the_disk_fills_while_records_are_added_all_of_them_are_kept(disk: Path) -> None:
    with opened(disk / "run") as history:
        history.add(RECORDS[:1], BY_KEY, {"measure": 2.0})
        filler = fill(disk)
        with pytest.raises(OSError, match="No space left") as full:
            (disk / "probe").write_bytes(bytes(4096))
        assert full.value.errno == errno.ENOSPC
        # The journal's own page may have room left; many candidates of one trial use that up.
        many = [make_record(CANDIDATES[1], "gpu_oom", trial="0002") for _ in range(20)]
        with pytest.raises(EnvironmentFaultError, match="full; free some space"):
            history.add(many, BY_KEY, {})
    filler.unlink()
    assert len(records_in(disk / "run")) == 1 + len(many)
    with opened(disk / "run") as history:
        history.add(RECORDS[1:], BY_KEY, {})
    assert records_in(disk / "run") == [RECORDS[0], *many, *RECORDS[1:]]


def test_when_even_the_reserve_is_not_enough_the_trial_is_named_and_the_rest_is_kept(disk: Path) -> None:
    with opened(disk / "run") as history:
        history.add(RECORDS[:1], BY_KEY, {})
        (history.folder / "reserve").unlink()
        filler = fill(disk)
        many = [make_record(CANDIDATES[1], "gpu_oom", trial="0002") for _ in range(20)]
        with pytest.raises(EnvironmentFaultError, match=r"Trial 0002 could not be written .* run again"):
            history.add(many, BY_KEY, {})
        kept = len(history.records)
    filler.unlink()
    assert records_in(disk / "run") == [RECORDS[0], *many[: kept - 1]]


def test_a_disk_that_is_full_from_the_start_is_said_before_any_trial(disk: Path) -> None:
    write_all(disk / "run")
    filler = fill(disk)
    assert "is full" in refused(disk / "run", advice="free some space")
    filler.unlink()
    assert records_in(disk / "run") == RECORDS


def test_a_disk_that_fills_under_any_other_file_of_the_run_is_no_bug_of_ladder(disk: Path) -> None:
    with opened(disk / "run") as history:
        fill(disk)
        with pytest.raises(EnvironmentFaultError, match="is full"), disk_faults(history):
            (disk / "run" / "server.log").write_bytes(bytes(4096))
        with pytest.raises(FileNotFoundError), disk_faults(history):
            (disk / "run" / "missing").read_bytes()


# Whose folder it is


def test_a_run_folder_is_its_owners_alone_also_where_it_was_not_before(written: Path, tmp_path: Path) -> None:
    (tmp_path / "made before").mkdir(mode=0o755)
    for folder in (tmp_path / "new", tmp_path / "made before", Path(shutil.copytree(written, tmp_path / "old"))):
        if folder.exists():
            folder.chmod(0o755)
        opened(folder).close()
        assert folder.stat().st_mode & 0o777 == 0o700


def test_an_open_folder_with_other_things_in_it_is_not_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o755)
    (folder / "thesis.tex").touch()
    with pytest.raises(EnvironmentFaultError, match=r"contains other files.*--run-dir"):
        opened(folder)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_a_symbolic_link_is_no_run_folder(copied: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(copied)
    with pytest.raises(EnvironmentFaultError, match="is a symbolic link"):
        opened(link)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(EnvironmentFaultError, match="is a symbolic link"):
        opened(dangling)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused_even_by_root(copied: Path) -> None:
    os.chown(copied, 12345, 12345)
    with pytest.raises(EnvironmentFaultError, match=r"belongs to another user \(uid 12345\)"):
        opened(copied)
