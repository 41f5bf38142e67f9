"""The run folder and the Optuna study in it, which is the only state of a tune."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState
from pydantic import TypeAdapter

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import CHECKPOINTING, Candidate
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.events.outcome import Record
from ladder.runs.journal import DamagedJournalError, Journal, open_storage
from ladder.techniques.registry import TECHNIQUES
from ladder.text import shown

SCHEMA_VERSION = 1
"""Version of the run folder's format. Chosen: it is increased when older versions would misread a folder."""
_STUDY = "ladder"
_SECONDS = "seconds of trials without a record"
_RECORD = TypeAdapter(Record)
_TRIAL_FOLDER = re.compile(r"\d{4,}")


_RESERVE_BYTES = 256 << 10
"""Reserved disk space, so that the last trial can still be recorded when the disk is full. Chosen: many times the size
of a trial's records."""
# What a tune may leave in its folder if it is killed before its journal exists.
_FIRST_FILES = frozenset({"trials", "lock", "reserve"})


class History(contextlib.AbstractContextManager["History"]):
    """An open run folder, locked against other tunes. `records` is everything measured so far, in order."""

    def __init__(self, folder: Path, fingerprint: str, facts: dict[str, Any]) -> None:
        """Open or create the folder. `facts` describe the run for readers of the study.

        UsageError if the folder has the history of another workload or machine, EnvironmentFaultError if it cannot be
        written or another tune is using it.
        """
        self.folder = folder
        self._journal = folder / "journal.log"
        make_private(folder)
        self._make_inside()
        self._lock = self._take_lock()
        try:
            self._reserve()
            self._study = self._open_study()
            self._check(fingerprint, facts)
            self.records: list[Record] = self._load()
        except BaseException:
            self.close()
            raise

    def _make_inside(self) -> None:
        try:
            (self.folder / "trials").mkdir(exist_ok=True)
            os.close(os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise self.unwritable(error) from None

    def unwritable(self, error: OSError) -> EnvironmentFaultError:
        """The error for a run folder that cannot be written."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return EnvironmentFaultError(
                f"The disk of the run folder {shown(self.folder)} is full; free some space and start the same command "
                "again (measurements are kept)."
            )
        return _unusable(self.folder, f"cannot be written ({error.strerror})")

    def _reserve(self) -> None:
        try:
            descriptor = os.open(self.folder / "reserve", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _RESERVE_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self.unwritable(error) from None

    def _open_study(self) -> optuna.Study:
        try:
            storage = open_storage(Journal(self._journal))
            if storage.get_all_studies():
                return optuna.load_study(study_name=_STUDY, storage=storage)
            return optuna.create_study(study_name=_STUDY, storage=storage, direction="maximize")
        except DamagedJournalError as damage:
            raise EnvironmentFaultError(
                f"The history in {shown(self.folder)} is damaged (line {damage.line} of journal.log); "
                "nothing was changed: restore it from a backup, or choose another --run-dir."
            ) from None
        except OSError as error:
            raise self.unwritable(error) from None
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
            raise self._of_another_version() from None

    def _of_another_version(self) -> UsageError:
        return UsageError(
            f"The history in {shown(self.folder)} was written by another version of ladder; use that version, or "
            "choose another --run-dir."
        )

    def _take_lock(self) -> int:
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                os.close(fd)
                raise _unusable(self.folder, f"cannot be locked ({error.strerror})") from None
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise EnvironmentFaultError(
                f"Another tune (pid {holder or 'unknown'}) is using {shown(self.folder)}; "
                "wait for it or choose another --run-dir."
            ) from None
        with contextlib.suppress(OSError):  # a full disk is reported elsewhere; the lock works without a pid
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        # A process with Optuna's own lock also has ours, so a lock file that is still here is a killed process's.
        (self.folder / "journal.log.lock").unlink(missing_ok=True)
        return fd

    def _check(self, fingerprint: str, facts: dict[str, Any]) -> None:
        known = self._study.user_attrs.get("run")
        if known is None:  # a single attribute, so that a kill leaves all of it or nothing
            run = {"schema_version": SCHEMA_VERSION, "fingerprint": fingerprint, "facts": facts}
            try:
                self._study.set_user_attr("run", run)
            except OSError as error:
                raise self.unwritable(error) from None
            return
        if known["schema_version"] > SCHEMA_VERSION:
            raise UsageError(
                f"{shown(self.folder)} was written by a newer ladder; upgrade, or choose another --run-dir."
            )
        if known["fingerprint"] != fingerprint:
            before = known["facts"]
            changed = [name for name in facts if before.get(name) != facts[name]] or ["something"]
            raise UsageError(
                f"{shown(self.folder)} holds the history of another tune ({', '.join(changed)} differ); "
                "choose another --run-dir."
            )

    def _load(self) -> list[Record]:
        trials = self._study.get_trials(deepcopy=False)
        try:
            return [_RECORD.validate_python(t.user_attrs["record"]) for t in trials if "record" in t.user_attrs]
        except ValueError:
            raise self._of_another_version() from None

    def next_trial(self) -> tuple[str, Path]:
        """The name and the folder of the next trial, which is not created yet. Names increase and are never reused."""
        names = [path.name for path in (self.folder / "trials").iterdir()] + [record.trial for record in self.records]
        taken = max((int(name) for name in names if _TRIAL_FOLDER.fullmatch(name)), default=0)
        name = f"{taken + 1:04d}"
        return name, self.folder / "trials" / name

    def add(self, records: Sequence[Record], candidates: dict[str, Candidate], seconds: dict[str, float]) -> None:
        """Append the records of one trial, with its seconds by phase.

        EnvironmentFaultError if the disk is full, after writing them all into the reserved space.
        """
        full: OSError | None = None
        for record in records:
            trial = _as_trial(record, candidates[record.candidate_key], seconds)
            try:
                self._study.add_trial(trial)
            except OSError as error:
                full = error
                (self.folder / "reserve").unlink(missing_ok=True)
                self._add_or_say_what_is_lost(trial, record)
            self.records.append(record)
        if full is not None:
            raise self.unwritable(full)

    def _add_or_say_what_is_lost(self, trial: optuna.trial.FrozenTrial, record: Record) -> None:
        try:
            self._study.add_trial(trial)
        except OSError as error:
            raise EnvironmentFaultError(
                f"Trial {record.trial} could not be written to {shown(self.folder)} ({error.strerror}) and will be "
                "run again; check the disk, then start the same command again."
            ) from None

    @property
    def space(self) -> dict[str, Any] | None:
        """What was searched when a tune last began here; None before the first."""
        facts = self._study.user_attrs.get("space")
        return facts["space"] if facts is not None else None

    def note_space(self, space: dict[str, Any], unsupported: dict[str, str]) -> None:
        """Store what is searched, for later readers of the run."""
        facts = {"space": space, "unsupported": unsupported}
        if self._study.user_attrs.get("space") != facts:
            self._study.set_user_attr("space", facts)

    def note_seconds(self, trial: str, seconds: dict[str, float]) -> None:
        """Store the seconds by phase of a trial without records."""
        try:
            self._study.set_user_attr(_SECONDS, self._study.user_attrs.get(_SECONDS, {}) | {trial: seconds})
        except OSError as error:
            raise self.unwritable(error) from None

    def trial_seconds(self, records: Sequence[Record]) -> dict[str, dict[str, float]]:
        """See `seconds_of`."""
        return seconds_of(self._study, records)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            (self.folder / "reserve").unlink(missing_ok=True)
        os.close(self._lock)

    def __exit__(self, *_: object) -> None:
        self.close()


def seconds_of(study: optuna.Study, records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Seconds by trial and phase, of trials with one of `records` and of trials without any record."""
    attributes = [trial.user_attrs for trial in study.get_trials(deepcopy=False)]
    wanted = {record.trial for record in records}
    recorded = {each["record"]["trial"]: each["trial_seconds"] for each in attributes if "record" in each}
    # Candidates that were refused or ruled out by another trial took no time.
    recorded = {trial: seconds for trial, seconds in recorded.items() if trial in wanted and seconds}
    return dict(sorted((study.user_attrs.get(_SECONDS, {}) | recorded).items()))


def _distributions() -> dict[str, BaseDistribution]:
    return {
        "rung": CategoricalDistribution(list(RUNGS_BY_NAME)),
        **{name: CategoricalDistribution([False, True]) for name in TECHNIQUES},
        "checkpointing": CategoricalDistribution(list(CHECKPOINTING)),
        "micro_batch": IntDistribution(1, 1 << 40),
    }


def _as_trial(record: Record, candidate: Candidate, seconds: dict[str, float]) -> optuna.trial.FrozenTrial:
    fits, speed = record.outcome.kind == "fits", record.tokens_per_second
    return optuna.trial.create_trial(
        state=TrialState.FAIL if not fits else TrialState.PRUNED if speed is None else TrialState.COMPLETE,
        values=None if speed is None else [speed],
        params={
            "rung": candidate.engine.rung.name,
            **{name: candidate.engine.has(technique) for name, technique in TECHNIQUES.items()},
            "checkpointing": candidate.checkpointing,
            "micro_batch": candidate.micro_batch,
        },
        distributions=_distributions(),
        user_attrs={
            "record": _RECORD.dump_python(record, mode="json"),
            "outcome": record.outcome.kind,
            "trial_seconds": seconds,
        },
    )


def make_private(folder: Path) -> None:
    """Create `folder`, readable only by its owner, or make an existing one so.

    EnvironmentFaultError if it is not safe to use, for example because it belongs to another user.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise _unusable(folder, "is a symbolic link")
        if not stat.S_ISDIR(found.st_mode):
            raise _unusable(folder, "is not a folder")
        if found.st_uid != os.geteuid():
            raise _unusable(folder, f"belongs to another user (uid {found.st_uid})")
        if found.st_mode & 0o077:
            inside = {path.name for path in folder.iterdir()}
            if "journal.log" not in inside and not inside <= _FIRST_FILES:
                raise _unusable(folder, "contains other files and is open to other users")
            folder.chmod(0o700)
    except OSError as error:
        raise _unusable(folder, f"cannot be written ({error.strerror})") from None


def _unusable(folder: Path, problem: str) -> EnvironmentFaultError:
    return EnvironmentFaultError(
        f"The run folder {shown(folder)} {problem}; choose a new one on a local disk with --run-dir."
    )
