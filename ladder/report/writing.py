"""Writes the reports into a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from ladder.emit import Answer, emit_all
from ladder.emit.files import write_atomically
from ladder.errors import EnvironmentFaultError
from ladder.report.about import ABOUT_NAME, note_about, read_about
from ladder.report.run_data import ANSWER_NAME, ReportedRun
from ladder.report.table import csv_text, rows
from ladder.text import shown


def write_reports(run: ReportedRun, answer: Answer | None = None) -> list[str]:
    """Write trials.csv, the answer with its companions, and report.html into the run's folder; returns the errors.

    Nothing is raised, since the answer itself is already written: a full disk, a missing package or a bug in a figure
    must not make the tune fail.
    """
    folder, on_gpus = run.folder, run.space.device == "cuda" and not run.simulated
    trouble = [_trouble(ABOUT_NAME, lambda: note_about(folder, on_gpus=on_gpus))]
    run = replace(run, about=read_about(folder))
    trouble.append(_trouble("trials.csv", lambda: write_atomically(folder / "trials.csv", csv_of([run]))))
    if answer is not None:
        trouble.append(_trouble(ANSWER_NAME, lambda: emit_all(answer, folder / ANSWER_NAME)))
    # The last file, because it shows the others' content and names the answer's files.
    trouble.append(_trouble("report.html", lambda: write_atomically(folder / "report.html", page_of([run]))))
    return list(filter(None, trouble))


def _trouble(name: str, write: Callable[[], object]) -> str:
    """Why `write` could not write `name`; empty if it could."""
    try:
        write()
    except EnvironmentFaultError as error:
        return str(error)
    except Exception as error:
        what = shown(f"{type(error).__name__}: {error}")
        return f"{name} could not be written ({what}), a bug in ladder; `ladder report` shows where."
    return ""


def load_page() -> None:
    """Import what report.html needs and compile its template, while there is time. `page_of` says what is missing."""
    with suppress(ModuleNotFoundError):
        from ladder.report.page import compile_template

        compile_template()


def page_of(runs: list[ReportedRun]) -> str:
    """The text of report.html. EnvironmentFaultError if a package that it needs is missing."""
    try:
        from ladder.report.page import html

        return html(runs)
    except ModuleNotFoundError as error:
        package = (error.name or "a package").partition(".")[0]
        raise EnvironmentFaultError(
            f"report.html cannot be written without {package}; `pip install {package}`, then run `ladder report`."
        ) from error


def csv_of(runs: Sequence[ReportedRun]) -> str:
    """The text of trials.csv. Several runs are told apart by their names in a first column."""
    tables = [(run.name, rows(run.entries, run.trial_seconds)) for run in runs]
    several = len(runs) > 1
    return csv_text([{"run": name, **row} if several else row for name, table in tables for row in table])
