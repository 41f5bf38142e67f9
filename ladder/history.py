"""The run folder, and the Optuna study in it: the only state there is."""

from __future__ import annotations

import fcntl
import json
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from pydantic import TypeAdapter

from ladder.candidates import RUNGS_BY_NAME, Candidate
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.outcome import Record

SCHEMA_VERSION = 1
_STUDY = "ladder"
_RECORD = TypeAdapter(Record)
_TRIAL_FOLDER = re.compile(r"\d{4,}")


def _open_study(journal: Path) -> optuna.Study:
    _drop_torn_tail(journal)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = JournalStorage(JournalFileBackend(str(journal)))
        return optuna.create_study(study_name=_STUDY, storage=storage, direction="maximize", load_if_exists=True)


class History:
    """An open run folder, locked against a second tune. `records` is everything measured so far, in order."""

    def __init__(self, folder: Path, fingerprint: str, facts: dict[str, Any]) -> None:
        """Open or create. `facts` describe the run for a reader of the study.

        Raises UsageError for a folder that holds another workload's or machine's history, EnvironmentFaultError for one
        that cannot be written or that another tune is using.
        """
        self.folder = folder
        self._make_folder()
        self._lock = self._take_lock()
        try:
            self._study = _open_study(folder / "journal.log")
            self._check(fingerprint, facts)
            self.records: list[Record] = self._load()
        except BaseException:
            self.close()
            raise

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.folder / "trials").mkdir(exist_ok=True)
            probe = self.folder / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise EnvironmentFaultError(
                f"The run folder {self.folder} cannot be written ({error.strerror}); choose another with --run-dir."
            ) from None

    def _take_lock(self) -> int:
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                os.close(fd)
                raise EnvironmentFaultError(
                    f"The run folder {self.folder} cannot be locked ({error.strerror}); choose one on a local disk with "
                    "--run-dir."
                ) from None
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise EnvironmentFaultError(
                f"Another tune (pid {holder or 'unknown'}) is using {self.folder}; "
                "wait for it or choose another --run-dir."
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        # Whoever held Optuna's own lock held ours too, so a lock file still there is a dead process's.
        (self.folder / "journal.log.lock").unlink(missing_ok=True)
        return fd

    def _check(self, fingerprint: str, facts: dict[str, Any]) -> None:
        known = self._study.user_attrs.get("run")
        if known is None:  # one attribute, one write: a kill leaves all of it or nothing
            run = {"schema_version": SCHEMA_VERSION, "fingerprint": fingerprint, "facts": facts}
            self._study.set_user_attr("run", run)
            return
        if known.get("schema_version", 0) > SCHEMA_VERSION:
            raise UsageError(f"{self.folder} was written by a newer ladder; upgrade, or choose another --run-dir.")
        if known.get("fingerprint") != fingerprint:
            before = known.get("facts", {})
            changed = [name for name in facts if before.get(name) != facts[name]] or ["something"]
            raise UsageError(
                f"{self.folder} holds the history of another tune ({', '.join(changed)} differ); "
                "choose another --run-dir."
            )

    def _load(self) -> list[Record]:
        trials = self._study.get_trials(deepcopy=False)
        return [_RECORD.validate_python(trial.user_attrs["record"]) for trial in trials if "record" in trial.user_attrs]

    def next_trial(self) -> tuple[str, Path]:
        """A name for the next trial and its folder, not yet made."""
        taken = [int(path.name) for path in (self.folder / "trials").iterdir() if _TRIAL_FOLDER.fullmatch(path.name)]
        name = f"{max(taken, default=0) + 1:04d}"
        return name, self.folder / "trials" / name

    def add(self, records: Sequence[Record], candidates: dict[str, Candidate], seconds: dict[str, float]) -> None:
        """Append the records of one trial, with where its time went."""
        for record in records:
            self.records.append(record)
            candidate = candidates[record.candidate_key]
            fits = record.outcome.kind == "fits"
            self._study.add_trial(
                optuna.trial.create_trial(
                    state=TrialState.COMPLETE if fits else TrialState.FAIL,
                    values=[record.tokens_per_second or 0.0] if fits else None,
                    params={
                        "rung": candidate.engine.rung.name,
                        "gradient_checkpointing": candidate.gradient_checkpointing,
                        "micro_batch": candidate.micro_batch,
                    },
                    distributions=_distributions(),
                    user_attrs={
                        "record": _RECORD.dump_python(record, mode="json"),
                        "outcome": record.outcome.kind,
                        "trial_seconds": seconds,
                    },
                )
            )

    def trial_seconds(self) -> dict[str, dict[str, float]]:
        """Where each trial's time went, by trial and phase."""
        return {
            trial.user_attrs["record"]["trial"]: trial.user_attrs["trial_seconds"]
            for trial in self._study.get_trials(deepcopy=False)
            if "record" in trial.user_attrs
        }

    def close(self) -> None:
        os.close(self._lock)

    def __enter__(self) -> History:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _distributions() -> dict[str, BaseDistribution]:
    return {
        "rung": CategoricalDistribution(list(RUNGS_BY_NAME)),
        "gradient_checkpointing": CategoricalDistribution([False, True]),
        "micro_batch": IntDistribution(1, 1 << 20),
    }


def _drop_torn_tail(journal: Path) -> None:
    """A controller killed while it wrote leaves half a line; what is appended next must not be glued to it."""
    try:
        data = journal.read_bytes()
    except FileNotFoundError:
        return
    whole = data.rfind(b"\n") + 1
    last = data[data.rfind(b"\n", 0, max(0, whole - 1)) + 1 : whole]
    if whole and not _is_json(last):
        whole -= len(last)
    if whole != len(data):
        os.truncate(journal, whole)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
