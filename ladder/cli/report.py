"""`ladder report`: writes the report of one run or of several, as HTML, Markdown or CSV."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ladder.errors import EXIT_FOUND, UsageError

if TYPE_CHECKING:
    from ladder.events.outcome import Record
    from ladder.report.run_data import ReportedRun


class ReportFormat(str, Enum):
    html = "html"
    markdown = "markdown"
    csv = "csv"


def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders. [default: the newest under ./ladder-runs]")
    ] = None,
    output_format: Annotated[ReportFormat, typer.Option("--format", help="How to write it.")] = ReportFormat.html,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The file to write. [default: html: report.html in the run folder, or here for several; else stdout]",
            show_default=False,
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Show the page in the browser too.")] = False,
) -> int:
    """Write what a tune found: figures, every candidate with its reason, and how to use the answer.

    Examples:

      ladder report

      ladder report ladder-runs/tiny-llama-0123456789ab --format markdown

      ladder report ladder-runs/one ladder-runs/other --output compared.html
    """
    from ladder.cli.explain import newest_run
    from ladder.report.run_data import named_apart

    reported = named_apart([read_reported_run(folder) for folder in runs or [newest_run()]])
    text = _text(reported, output_format)
    if output is None and output_format is ReportFormat.html:
        output = reported[0].folder / "report.html" if len(reported) == 1 else Path("report.html")
    if output is None:
        typer.echo(text, nl=False)
        return EXIT_FOUND
    from ladder.emit.files import require_file_name, write_atomically

    require_file_name(output, "report.html")
    write_atomically(output, text)
    typer.echo(f"Wrote {output}")
    if show:
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


def _text(runs: list[ReportedRun], output_format: ReportFormat) -> str:
    if output_format is ReportFormat.html:
        from ladder.report.writing import page_of

        return page_of(runs)
    if output_format is ReportFormat.markdown:
        from ladder.report.markdown import markdown

        return markdown(runs)
    from ladder.report.writing import csv_of

    return csv_of(runs)
