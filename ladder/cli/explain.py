"""`ladder explain`: prints the ledger of a tune, or why a rung is not its answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ladder.cli.declared import takes
from ladder.errors import EXIT_FOUND, LadderError, UsageError
from ladder.options.declaring import Option
from ladder.options.kinds import whole
from ladder.options.tune import check_rungs, rung_names

if TYPE_CHECKING:
    from ladder.events.outcome import Record
    from ladder.runs.stored_run import StoredRun
    from ladder.search.bound import Bound
    from ladder.search.ledger import Entry

_RUNS = Path("ladder-runs")


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """What is explained, and how it is printed."""

    run: Annotated[Path | None, Option("A run folder.", is_argument=True, unset="the newest under ./ladder-runs")] = (
        None
    )
    why: Annotated[
        str | None,
        Option("One sentence: why is this rung not the answer?", metavar="RUNG", names=rung_names),
    ] = None
    top: Annotated[int | None, Option("Only N: the fastest that fit, measured or predicted.", kind=whole(1))] = None
    rung: Annotated[
        str | None, Option("Only this rung, with and without techniques.", metavar="RUNG", names=rung_names)
    ] = None
    bound: Annotated[bool, Option("How close is the answer to what the GPUs could do, and what takes the rest?")] = (
        False
    )
    output_format: Annotated[
        Literal["text", "json"], Option("json: one document, with the columns of trials.csv.", flag="--format")
    ] = "text"


@takes(ExplainOptions)
def explain(asked: ExplainOptions) -> int:
    """List every candidate: measured, predicted or pruned, why, and in which trial.

    In a pipe or a file each candidate has one line, however long.

    Examples:

      ladder explain --top 10

      ladder explain --rung zero3 --format json

      ladder explain ladder-runs/tiny-llama-0123456789ab --why zero2

      ladder explain --bound
    """
    try:
        return (_explain_bound if asked.bound else _explain)(asked)
    except LadderError as error:
        if asked.output_format == "json":
            from ladder.cli.tune_result import error_as_json

            typer.echo(error_as_json(error))
        raise


def _explain(asked: ExplainOptions) -> int:
    from ladder.report.run_data import is_simulated
    from ladder.report.summary import SIMULATED
    from ladder.runs.stored_run import read_run
    from ladder.search.ledger import ledger

    as_json = asked.output_format == "json"
    for option, name in (("--why", asked.why), ("--rung", asked.rung)):
        if name is not None:
            check_rungs([name], option, or_engines=True)
    if asked.why is not None and (asked.top is not None or asked.rung is not None or as_json):
        raise UsageError("--why prints only one sentence about one rung; leave out --top, --rung and --format.")
    folder = asked.run if asked.run is not None else newest_run()
    stored = read_run(folder)
    on_paper = is_simulated(stored.facts)
    entries = ledger(stored.space, stored.records, stored.unsupported, on_paper=on_paper)
    if as_json:
        typer.echo(_document(folder, stored, _asked_for(entries, asked), on_paper=on_paper))
        return EXIT_FOUND
    if asked.why is not None:
        _say_why(asked.why, entries, stored)
    else:
        _print(entries, _asked_for(entries, asked), stored)
    if on_paper:
        typer.echo(SIMULATED)
    return EXIT_FOUND


def _explain_bound(asked: ExplainOptions) -> int:
    from ladder.runs.stored_run import read_run
    from ladder.search.bound import bound
    from ladder.search.policy import answer

    if any(other is not None for other in (asked.why, asked.top, asked.rung)):
        raise UsageError("--bound is about the answer alone; leave out --why, --top and --rung.")
    folder = asked.run if asked.run is not None else newest_run()
    stored = read_run(folder)
    best = answer(stored.records)
    if best is None:
        raise UsageError("This tune has no answer yet; --bound is about the answer.")
    limit = bound(stored.space, stored.records, best)
    if limit is None:
        raise UsageError(
            "The proof of this answer did not time the model's matrix products: it was simulated, or of a script, or "
            "no memory was left for them."
        )
    if asked.output_format == "json":
        document = {"run_dir": str(folder.resolve()), **bound_document(best, limit)}
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(bound_lines(best, limit, stored.space.device)))
    return EXIT_FOUND


def bound_lines(best: Record, limit: Bound, device: str) -> list[str]:
    """The answer's share of the limit, and a line for each part of its step."""
    speed, where = best.tokens_per_second or 0.0, "GPU" if device == "cuda" else "CPU rank"
    rate = limit.matrix_flops / 1e12
    rows = [
        f"{best.candidate_key} trains {speed:,.0f} tokens/s: {limit.share:.0%} of the {limit.tokens_per_second:,.0f} "
        "that matrix products alone would allow.",
        f"The proof measured {rate:,.3g} TFLOP/s in products of the model's sizes on each {where}.",
        f"Its optimizer step takes {limit.step_seconds:.3g} s:",
    ]
    for part in sorted(limit.parts, key=lambda part: -part.seconds):
        rows.append(f"  {part.seconds / limit.step_seconds:4.0%}  {part.seconds:7.3g} s  {part.meaning}")
    return rows


def bound_document(best: Record, limit: Bound) -> dict[str, Any]:
    """The same as `bound_lines` for JSON."""
    return {
        "answer": best.candidate_key,
        "tokens_per_second": best.tokens_per_second,
        "bound_tokens_per_second": round(limit.tokens_per_second, 1),
        "share": round(limit.share, 4),
        "matrix_flops": limit.matrix_flops,
        "step_seconds": limit.step_seconds,
        "parts": {part.short: part.seconds for part in limit.parts},
    }


def _asked_for(entries: list[Entry], asked: ExplainOptions) -> list[Entry]:
    from ladder.cli.ledger_view import fastest_first
    from ladder.techniques.keys import rung_of

    if asked.rung is not None:
        entries = [entry for entry in entries if asked.rung in (entry.rung, rung_of(entry.rung).name)]
        if not entries:
            raise UsageError(f"--rung {asked.rung} was not part of this tune.")
    return fastest_first(entries, asked.top) if asked.top is not None else entries


def _say_why(rung: str, entries: list[Entry], stored: StoredRun) -> None:
    from ladder.search.why import why_not

    try:
        typer.echo(why_not(rung, entries, stored.space))
    except ValueError as error:
        raise UsageError(f"{error}; tune again with options that include it.") from None


def _print(entries: list[Entry], shown: list[Entry], stored: StoredRun) -> None:
    """Print the entries in `shown`, and how many of `entries` there are of each kind."""
    from ladder.cli.console import stdout_console
    from ladder.cli.ledger_view import print_entries
    from ladder.report.summary import and_knobs, tried

    print_entries(shown, stdout_console())
    num_tried, num_knobs = tried(stored.space, stored.records)
    counts = {name: sum(entry.status == name for entry in entries) for name in ("predicted", "pruned", "refused")}
    untried = [f"{number} {name}" for name, number in counts.items() if number or name != "refused"]
    some = f"{len(shown)} of {len(entries)} shown: " if len(shown) < len(entries) else ""
    typer.echo(some + ", ".join([f"{num_tried} measured{and_knobs(num_knobs)}", *untried]))


def _document(folder: Path, stored: StoredRun, entries: list[Entry], *, on_paper: bool) -> str:
    from ladder.report.first_fit import first_fit
    from ladder.report.table import rows
    from ladder.search.policy import answer

    best, found = answer(stored.records), first_fit(stored.space, stored.records)
    document = {
        "run_dir": str(folder.resolve()),
        "simulated": on_paper,
        "answer": best.candidate_key if best else None,
        "recipe_first_fit": found.plain() if found else None,
        "candidates": rows(entries, stored.trial_seconds),
    }
    return json.dumps(document, indent=2, allow_nan=False)


def newest_run() -> Path:
    """The run folder in ./ladder-runs that a tune used last. UsageError if there is none."""
    if not (folders := runs_here()):
        raise UsageError(f"There is no run in ./{_RUNS}; name the run folder, or start `ladder tune` first.")
    return folders[0]


def runs_here() -> list[Path]:
    """The run folders in ./ladder-runs, the one that a tune used last first."""
    return sorted((path.parent for path in _RUNS.glob("*/journal.log")), key=_last_tuned, reverse=True)


def _last_tuned(folder: Path) -> float:
    """When a tune last began there or added a record. A tune that has nothing left to measure writes only its lock."""
    files = (folder / "journal.log", folder / "lock")
    return max(file.stat().st_mtime for file in files if file.exists())
