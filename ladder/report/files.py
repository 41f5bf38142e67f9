"""What a tune leaves in its run folder for people to read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ladder.report.table import frame
from ladder.search.ledger import ledger
from ladder.tuner import TuneResult


def write_reports(result: TuneResult, trial_seconds: Mapping[str, Mapping[str, float]], folder: Path) -> str | None:
    """Write trials.csv into `folder`; returns what went wrong.

    The answer is written by then: a full disk may not turn it into a failure.
    """
    entries = ledger(result.space, result.records, result.unsupported)
    try:
        frame(entries, trial_seconds).to_csv(folder / "trials.csv", index=False)
    except OSError as error:
        return f"trials.csv could not be written ({error.strerror})"
    return None
