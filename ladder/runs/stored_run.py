"""Reads a run folder without locking it, since a tune may be running."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from pydantic import TypeAdapter

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Rung
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.events.outcome import Record
from ladder.runs.history import seconds_of
from ladder.runs.journal import DamagedJournalError, ReadOnlyJournal, open_storage
from ladder.runs.snapshot import space_from_dict
from ladder.search.relevance import relevant
from ladder.search.space import Space
from ladder.text import shown

_RECORD = TypeAdapter(Record)


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A finished tune, or a running one so far, in bytes and seconds."""

    space: Space
    unsupported: dict[Rung, str]
    records: list[Record]
    """Only those that belong to the space of the folder's last tune."""
    trial_seconds: dict[str, dict[str, float]]
    """By trial and phase."""
    facts: dict[str, Any]
    """The facts in the history's fingerprint: model, GPU, versions, …"""


def read_run(folder: Path) -> StoredRun:
    """The run in `folder`. UsageError if there is none, EnvironmentFaultError if it cannot be read."""
    journal = folder / "journal.log"
    if not journal.is_file():
        raise UsageError(f"{shown(folder)} is not a run folder, as it has no journal.log; name a folder of a tune.")
    try:
        study = optuna.load_study(study_name=None, storage=open_storage(ReadOnlyJournal(journal)))
        facts = study.user_attrs["space"]
        if "tried" in facts["space"]:
            said = "what was tried is in its best_generation.json, and the same `ladder tune` prints it again"
            raise UsageError(f"{shown(folder)} is a tune of generation; {said}.")
        space = space_from_dict(facts["space"])
        unsupported = {RUNGS_BY_NAME[name]: reason for name, reason in facts["unsupported"].items()}
        trials = study.get_trials(deepcopy=False)
        attributes = [trial.user_attrs for trial in trials if "record" in trial.user_attrs]
        records = relevant(space, [_RECORD.validate_python(each["record"]) for each in attributes])
        seconds = seconds_of(study, records)
        about = dict(study.user_attrs["run"]["facts"])
    except DamagedJournalError as damage:
        raise EnvironmentFaultError(
            f"The history in {shown(folder)} is damaged (line {damage.line} of journal.log); nothing was changed: "
            "restore it from a backup."
        ) from None
    except OSError as error:
        raise EnvironmentFaultError(f"{shown(journal)} cannot be read ({error.strerror}).") from None
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"{shown(folder)} does not say what was searched: another version of ladder wrote it, or no trial began; "
            "start the tune again."
        ) from None
    return StoredRun(space=space, unsupported=unsupported, records=records, trial_seconds=seconds, facts=about)
