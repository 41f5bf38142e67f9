"""What `ladder tune` says at its end: the table and the answer, or one JSON document."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from ladder.cli.console import stdout_console
from ladder.report.table import rows, terminal_table
from ladder.report.times import total_line
from ladder.search.audit import audit_report
from ladder.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from ladder.errors import LadderError
    from ladder.search.ledger import Entry
    from ladder.tuning.run import TuneOutput


def print_result(done: TuneOutput, *, quiet: bool) -> None:
    """For people, on stdout; `quiet` leaves out the table and how the search went."""
    console = stdout_console()
    if not quiet:
        _print_search(done, done.ledger, console)
    _print_answer(done, console)


def _print_search(done: TuneOutput, entries: Sequence[Entry], console: Console) -> None:
    result = done.result
    console.print(terminal_table(entries, console.width))
    on_paper = done.simulated is not None
    console.print(f"\nStopped: {escape(result.stopped)}; {result.seconds:.0f} s{' on paper' if on_paper else ''}.")
    if (report := done.run_dir / "report.html").exists():  # or a warning has said why not
        console.print(f"Report: {report}", soft_wrap=True, markup=False)
    console.print(total_line(done.trial_seconds, on_paper=on_paper))
    if result.space.audit:
        console.print(f"Audit: {audit_report(result.space, result.records).sentence()}.")


def _print_answer(done: TuneOutput, console: Console) -> None:
    if done.answer is not None:
        answer = done.answer
        how = "proven in fresh processes" if done.simulated is None else f"simulated on {escape(done.simulated)}"
        console.print(
            f"[bold green]{escape(answer.candidate.key)}[/]: {answer.tokens_per_second:,.0f} tokens/s, "
            f"{format_bytes(answer.measurement.peak_device)} of {format_bytes(answer.memory_limit)} "
            f"({answer.headroom:.0%} headroom), {how}."
        )
        for warning in answer.warnings:
            console.print(f"[yellow]Warning:[/] {escape(warning)}.")
        files = ", ".join(shlex.quote(str(path)) for path in done.files)
        console.print(f"Wrote {files}", soft_wrap=True, markup=False)
    elif done.result.best_so_far is not None:
        best = done.result.best_so_far
        console.print(f"Best so far, not proven: {escape(best.candidate_key)}, {best.tokens_per_second:,.0f} tokens/s.")


def as_json(done: TuneOutput, failure: LadderError | None = None) -> str:
    """The whole result as one document: the answer's "ladder" section or why there is none, and the ledger's rows."""
    from ladder.emit.config import SECTION, best_config

    best = done.result.best_so_far
    document: dict[str, Any] = {
        "answer": best_config(done.answer)[SECTION] if done.answer else None,
        **(_failure(failure) if failure else {}),
        "best_so_far": best.candidate_key if best else None,
        "simulated_on": done.simulated,
        "stopped": done.result.stopped,
        "cancelled": done.result.cancelled,
        "seconds": round(done.result.seconds, 1),
        "run_dir": str(done.run_dir.resolve()),
        "files": [str(path) for path in done.files],
        "candidates": rows(done.ledger, done.trial_seconds),
    }
    return json.dumps(document, indent=2, allow_nan=False)


def error_as_json(error: LadderError) -> str:
    """What stands on stdout where there is no result: a reader of JSON always gets a document."""
    return json.dumps(_failure(error), indent=2)


def _failure(error: LadderError) -> dict[str, Any]:
    return {"error": str(error), "exit_code": error.exit_code}
