"""`ladder report`: writes the report of one run or of several, as HTML, Markdown or CSV."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ladder.cli.declared import takes
from ladder.errors import EXIT_FOUND, UsageError
from ladder.options.declaring import Option

if TYPE_CHECKING:
    from ladder.events.outcome import Record
    from ladder.report.run_data import ReportedRun


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What is reported, and where to."""

    runs: Annotated[
        tuple[Path, ...], Option("Run folders.", is_argument=True, unset="the newest under ./ladder-runs")
    ] = ()
    output_format: Annotated[Literal["html", "markdown", "csv"], Option("How to write it.", flag="--format")] = "html"
    output: Annotated[
        Path | None,
        Option("The file to write.", unset="html: report.html in the run folder, or here for several; else stdout"),
    ] = None
    show: Annotated[bool, Option("Show the page in the browser too.", flag="--open")] = False


@takes(ReportOptions)
def report(asked: ReportOptions) -> int:
    """Write what a tune found: figures, every candidate with its reason, and how to use the answer.

    Examples:

      ladder report

      ladder report ladder-runs/tiny-llama-0123456789ab --format markdown

      ladder report ladder-runs/one ladder-runs/other --output compared.html
    """
    from ladder.cli.explain import newest_run
    from ladder.report.run_data import named_apart

    reported = named_apart([read_reported_run(folder) for folder in asked.runs or [newest_run()]])
    text, output = _text(reported, asked.output_format), asked.output
    if output is None and asked.output_format == "html":
        output = reported[0].folder / "report.html" if len(reported) == 1 else Path("report.html")
    if output is None:
        typer.echo(text, nl=False)
        return EXIT_FOUND
    from ladder.emit.files import require_file_name, write_atomically

    require_file_name(output, "report.html")
    write_atomically(output, text)
    typer.echo(f"Wrote {output}")
    if asked.show:
        import webbrowser

        if not webbrowser.open(output.absolute().as_uri()):
            typer.echo(f"No browser was found here; open {output} in one.")
    return EXIT_FOUND


def read_reported_run(folder: Path) -> ReportedRun:
    """The run in `folder` so far. UsageError if nothing was measured yet."""
    from ladder.report.about import read_about
    from ladder.report.run_data import ANSWER_NAME, ReportedRun
    from ladder.runs.stored_run import read_run
    from ladder.search.policy import answer

    stored = read_run(folder)
    if not stored.records:
        raise UsageError(f"{str(folder)!r} has no results yet: no trial has ended; wait, or start the tune again.")
    return ReportedRun(
        **vars(stored),
        folder=folder,
        config=_config(folder / ANSWER_NAME, answer(stored.records)),
        about=read_about(folder),
    )


def _config(path: Path, found: Record | None) -> dict[str, Any] | None:
    """The file's content if it is for the answer `found`. An earlier tune with other options may have left another."""
    from ladder.emit.config import SECTION, candidate_key_in, load_best_config

    try:
        config = load_best_config(path)
    except UsageError:  # there is no answer yet, or the file was edited
        return None
    return config if found is not None and candidate_key_in(config[SECTION]) == found.candidate_key else None


def _text(runs: list[ReportedRun], output_format: str) -> str:
    if output_format == "html":
        from ladder.report.writing import page_of

        return page_of(runs)
    if output_format == "markdown":
        from ladder.report.markdown import markdown

        return markdown(runs)
    from ladder.report.writing import csv_of

    return csv_of(runs)
