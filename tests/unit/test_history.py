"""The run folder keeps what was measured, through anything, and is never mistaken for another tune's."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from helpers import make_candidate, make_measurement, make_record
from helpers.searches import make_space

from ladder.errors import EnvironmentFaultError, UsageError
from ladder.events.outcome import Outcome, Record
from ladder.runs.history import SCHEMA_VERSION, History
from ladder.runs.journal import _CHECKSUM, _checksum
from ladder.runs.snapshot import knowing_what_was_known, space_to_dict

FACTS: dict[str, Any] = {"model": "tiny-llama", "world size": 2}
CANDIDATES = [make_candidate(micro_batch=size, accumulation=8 // size) for size in (1, 2, 4)]
BY_KEY = {candidate.key: candidate for candidate in CANDIDATES}
OOM = Outcome(
    kind="gpu_oom",
    sentence="rank 1 ran out of GPU memory in forward",
    rank=1,
    moment="forward",
    bytes_asked=3,
    bytes_free=2,
)
RECORDS = [
    make_record(CANDIDATES[0], measurement=make_measurement(losses=(9.0, 8.5)), warnings=("thin headroom",)),
    make_record(CANDIDATES[1], "gpu_oom", outcome=OOM),
    make_record(CANDIDATES[0], trial="0002", purpose="proof", tokens_per_second=99.5),
]


def opened(folder: Path, fingerprint: str = "abc", facts: dict[str, Any] | None = None) -> History:
    return History(folder, fingerprint, FACTS if facts is None else facts)


def records_in(folder: Path) -> list[Record]:
    with opened(folder) as history:
        return history.records


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with all RECORDS. Opening adds a line to the journal, so tests copy it."""
    folder = tmp_path_factory.mktemp("history") / "run"
    with opened(folder) as history:
        for record in RECORDS:
            history.add([record], BY_KEY, {"start": 0.5, "measure": 2.0})
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


def test_records_and_where_the_time_went_survive_reopening_also_of_trials_that_leave_no_record(copied: Path) -> None:
    with opened(copied) as history:
        assert history.records == RECORDS
        took = {"start": 0.5, "measure": 2.0}
        assert history.trial_seconds(history.records) == {"0001": took, "0002": took}
        history.note_seconds("0004", {"start": 1.0})
        history.note_seconds("0003", {"start": 2.0})
        history.add([make_record(CANDIDATES[2], "host_oom", trial="0009")], BY_KEY, {})  # refused: it took no time
    with opened(copied) as history:
        assert list(history.trial_seconds(history.records)) == ["0001", "0002", "0003", "0004"]
        assert history.trial_seconds(history.records)["0003"] == {"start": 2.0}
        of_second = [record for record in history.records if record.trial == "0002"]
        assert list(history.trial_seconds(of_second)) == ["0002", "0003", "0004"]


def test_the_study_is_an_ordinary_optuna_study_with_one_trial_a_record(copied: Path) -> None:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(copied / "journal.log")))
    study = optuna.load_study(study_name="ladder", storage=storage)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert study.trials[0].values == [100.0]
    said = study.trials[0].params
    assert (said["rung"], said["checkpointing"], said["micro_batch"], said["liger"]) == ("zero2", "on", 1, False)
    assert study.trials[1].user_attrs["outcome"] == "gpu_oom"


def test_another_fingerprint_is_refused_naming_what_differs(copied: Path) -> None:
    with pytest.raises(UsageError, match=r"\(world size differ\).*--run-dir"):
        opened(copied, "xyz", {**FACTS, "world size": 4})
    assert records_in(copied) == RECORDS, "and the refused opening keeps no lock"


def test_a_newer_schema_is_refused(copied: Path) -> None:
    journal = copied / "journal.log"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    (run,) = [line["user_attr"]["run"] for line in lines if "run" in line.get("user_attr", {})]
    run["schema_version"] = SCHEMA_VERSION + 1
    last = 0
    for line in lines:
        del line[_CHECKSUM]
        line[_CHECKSUM] = last = _checksum(line, last)
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UsageError, match="newer ladder"):
        opened(copied)


def test_a_second_opener_is_refused_with_the_pid_of_the_first(copied: Path) -> None:
    with opened(copied), pytest.raises(EnvironmentFaultError, match=rf"pid {os.getpid()}\)"):
        opened(copied)
    assert records_in(copied) == RECORDS


def test_the_lock_of_a_dead_tune_locks_nobody_out(copied: Path) -> None:
    (copied / "lock").write_text("999999")
    (copied / "journal.log.lock").touch()  # Optuna's own, which it would wait for
    with opened(copied) as history:
        history.add(RECORDS[:1], BY_KEY, {})
    assert len(records_in(copied)) == len(RECORDS) + 1


@pytest.mark.parametrize("cut", [0, 1, 300, 700])
def test_after_a_torn_tail_the_history_goes_on_from_the_record_before(copied: Path, cut: int) -> None:
    journal = copied / "journal.log"
    journal.write_bytes(journal.read_bytes()[:-cut] if cut else journal.read_bytes() + b'{"op_code": 4, "wor\0\0\n')
    with opened(copied) as history:
        assert history.records == (RECORDS[:-1] if cut else RECORDS)
        history.add(RECORDS[len(history.records) :], BY_KEY, {})
    assert records_in(copied) == RECORDS


def test_a_tune_killed_while_it_made_its_folder_can_be_started_again(copied: Path) -> None:
    journal = copied / "journal.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    for count in range(3):
        journal.write_bytes(b"".join(lines[:count]))
        assert records_in(copied) == []


@pytest.mark.parametrize("place", ["beneath a file", "in /proc"])
def test_a_folder_that_cannot_be_written_is_the_environments_fault(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = {"beneath a file": tmp_path / "file" / "run", "in /proc": Path("/proc/ladder-run")}[place]
    with pytest.raises(EnvironmentFaultError, match=r"cannot be written.*--run-dir"):
        opened(folder)


def test_trials_are_numbered_on_from_the_highest_there_is(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as history:
        name, folder = history.next_trial()
        assert (name, folder) == ("0001", tmp_path / "run" / "trials" / "0001")
        assert not folder.exists()
        assert history.next_trial()[0] == "0001"  # a trial that never made its folder took no number
        for taken in ("0001", "0007", "notes", "12", "0009.old"):
            (tmp_path / "run" / "trials" / taken).mkdir()
        assert history.next_trial()[0] == "0008"
        (tmp_path / "run" / "trials" / "12345").mkdir()
        assert history.next_trial()[0] == "12346"
        history.add([make_record(CANDIDATES[0], trial="12350")], BY_KEY, {})  # it left no folder
        assert history.next_trial()[0] == "12351"


def test_a_tune_that_is_started_again_knows_what_it_knew_when_it_began(tmp_path: Path) -> None:
    """What it has taught the machine meanwhile would have it try more, and claim something else."""
    first = replace(make_space("zero1"), learned=(("compute", 0.5, 0.1),), rates=(("link_bytes", 2e9),))
    taught = replace(first, learned=(("compute", 0.9, 0.1),), rates=(), earlier=(("zero1 ckpt=off mb=1", None, 0.5),))
    with History(tmp_path / "run", "abc", {}) as history:
        assert knowing_what_was_known(first, history.space) == first
        history.note_space(space_to_dict(first), {})
    with History(tmp_path / "run", "abc", {}) as history:
        again = knowing_what_was_known(replace(taught, tolerance=0.5), history.space)
    assert again == replace(first, tolerance=0.5)
