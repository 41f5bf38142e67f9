"""What a tune leaves in its run folder for people to read."""

from __future__ import annotations

from collections.abc import Callable

from ladder.emit.config import to_json
from ladder.emit.files import write_atomically
from ladder.errors import EnvironmentFaultError
from ladder.report.page import html
from ladder.report.run_data import ReportedRun
from ladder.report.table import frame

ANSWER_NAME = "best_config.json"


def write_reports(run: ReportedRun) -> list[str]:
    """Write trials.csv, report.html and a copy of the answer into the run's folder; returns what went wrong.

    The answer itself is written by then: a full disk may not turn it into a failure.
    """
    texts: dict[str, Callable[[], str]] = {
        "trials.csv": lambda: frame(run.entries, run.trial_seconds).to_csv(index=False),
        "report.html": lambda: html([run]),
    }
    if run.config is not None:
        texts[ANSWER_NAME] = lambda: to_json(run.config or {})
    trouble = []
    for name, compose in texts.items():
        try:
            write_atomically(run.folder / name, compose())
        except EnvironmentFaultError as error:
            trouble.append(str(error))
    return trouble
