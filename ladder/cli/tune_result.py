"""What `ladder tune` prints at its end: the table and the answer, or one JSON document."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from ladder.cli.console import stdout_console
from ladder.report.as_it_stands import compared, compared_without_deepspeed
from ladder.report.first_fit import first_fit
from ladder.report.noise import busy_sentence, not_told_apart
from ladder.report.summary import spelled_out
from ladder.report.table import left_out, rows, terminal_table, unsupported_line
from ladder.report.times import total_line
from ladder.search.space import measured, plain_as_it_stands
from ladder.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from ladder.emit import Answer
    from ladder.errors import LadderError
    from ladder.search.ledger import Entry
    from ladder.tuning.answering import TuneOutput


_FEWEST_LINES = 8
"""Of the table, even on a low terminal. Chosen by eye."""
_LINES_OF_A_FILE = 50
"""Lines of output without a terminal: about what an editor shows at once. Chosen by eye."""
_WRAPS = 100
"""With fewer columns, the sentences below the table wrap (measured in a terminal)."""
_LINES_BELOW, _LINES_BELOW_IF_WIDE = 23, 18
"""Lines around the table: its heading, the sentences below it, and the prompt. Counted (measured) at 80 and at 120
columns.
"""


def print_result(done: TuneOutput, *, quiet: bool) -> None:
    """Print the result on stdout; with `quiet`, without the table and the course of the search."""
    console = stdout_console()
    if not quiet:
        _print_search(done, done.ledger, console)
    if busy := busy_sentence(done.result.records):
        console.print(f"[yellow]{escape(busy)}[/]")
    _print_answer(done, console)


def _print_search(done: TuneOutput, entries: Sequence[Entry], console: Console) -> None:
    result = done.result
    height = console.height if console.is_terminal else _LINES_OF_A_FILE
    most = max(_FEWEST_LINES, height - (_LINES_BELOW if console.width < _WRAPS else _LINES_BELOW_IF_WIDE))
    console.print(terminal_table(entries, console.width, most))
    for line in (left_out(entries, console.width, most), unsupported_line(entries)):
        if line:
            console.print(line, style="dim", markup=False)
    on_paper = done.simulated is not None
    simulated = " of simulated time" if on_paper else ""
    console.print(f"\nStopped: {escape(result.stopped)}; {result.seconds:.0f} s{simulated}.")
    if (report := done.run_dir / "report.html").exists():  # otherwise a warning has said why
        console.print(f"Report: {report}", soft_wrap=True, markup=False)
    console.print(total_line(done.trial_seconds, on_paper=on_paper))


def _print_answer(done: TuneOutput, console: Console) -> None:
    if done.answer is not None:
        answer = done.answer
        how = "proven in fresh processes" if done.simulated is None else f"simulated on {escape(done.simulated)}"
        console.print(
            f"[bold green]{escape(answer.candidate.key)}[/]: {answer.tokens_per_second:,.0f} tokens/s in its proof"
            f"{_in_its_trial(done)}{_speed_of_a_training(answer)}, {format_bytes(answer.measurement.peak_device)} of "
            f"{format_bytes(answer.memory_limit)} ({answer.headroom:.0%} headroom){_in_a_training(answer)}, {how}."
        )
        console.print(f"That is {escape(spelled_out(answer.candidate, done.result.space))}.")
        if done.result.answer and (said := compared(done.result.space, done.result.records, done.result.answer)):
            console.print(f"[bold]{escape(said)}[/]")
        if done.result.answer and (near := not_told_apart(done.result.space, done.result.records, done.result.answer)):
            console.print(escape(near))
        if (first := done.result.first) and first.proof.candidate_key != answer.candidate.key:
            ahead = answer.tokens_per_second / (first.proof.tokens_per_second or math.inf)
            rest = f"the {done.result.seconds - first.seconds:.0f} s after it found one {ahead:.2f} times as fast"
            console.print(f"The first answer was proven after {first.seconds:.0f} s; {rest}.")
        for warning in answer.warnings:
            console.print(f"[yellow]Warning:[/] {escape(warning)}.")
        _print_plain(done, console, answer)
        _print_files(done, console)
    elif done.plain is not None:
        _print_plain(done, console, None)
        _print_files(done, console)
    elif done.result.best_so_far is not None:
        best = done.result.best_so_far
        console.print(f"Best so far, not proven: {escape(best.candidate_key)}, {best.tokens_per_second:,.0f} tokens/s.")


def _print_files(done: TuneOutput, console: Console) -> None:
    """What was written, and where that is which was there before and is not this tune's."""
    for verb, paths in (("Wrote", done.files), ("Kept what another tune wrote, or was edited, as", done.kept)):
        if paths:
            console.print(f"{verb} {', '.join(shlex.quote(str(path)) for path in paths)}", soft_wrap=True, markup=False)


def _print_plain(done: TuneOutput, console: Console, with_deepspeed: Answer | None) -> None:
    """The answer without DeepSpeed, and how much faster it is than the one with it, and than a script's own way."""
    plain, result = done.plain, done.result
    if plain is None:
        return
    than = (
        ""
        if with_deepspeed is None
        else f", {plain.tokens_per_second / with_deepspeed.tokens_per_second:.2f} times as fast"
    )
    console.print(
        f"Without DeepSpeed: [bold green]{escape(plain.candidate.key)}[/]: {plain.tokens_per_second:,.0f} tokens/s in "
        f"its proof{than}{_speed_of_a_training(plain)}, {format_bytes(plain.measurement.peak_device)} of "
        f"{format_bytes(plain.memory_limit)}{_in_a_training(plain)}."
    )
    best = result.answer if with_deepspeed is not None else None
    if said := compared_without_deepspeed(result.space, result.records, best):
        console.print(f"[bold]{escape(said)}[/]")
    for warning in plain.warnings:
        if with_deepspeed is not None and warning in with_deepspeed.warnings:
            continue
        console.print(f"[yellow]Warning:[/] {escape(warning)}.")


def _speed_of_a_training(answer: Answer) -> str:
    """The range of its speed, if the machine is not steady enough for one figure."""
    return f", {answer.promised_speed} in a training" if answer.tokens_per_second_range else ""


def _in_a_training(answer: Answer) -> str:
    """What a whole training of a script may hold, which is more than its proof did."""
    most = answer.promised_device
    return "" if most is None else f", at most {format_bytes(most)} in a whole training"


def _in_its_trial(done: TuneOutput) -> str:
    """The answer's speed in its trial, which the table shows too."""
    record = measured(done.result.records).get(done.answer.candidate.key) if done.answer else None
    return f" ({record.tokens_per_second:,.0f} in its trial)" if record and record.tokens_per_second else ""


def as_json(done: TuneOutput, failure: LadderError | None = None) -> str:
    """The whole result as one JSON document: the answer's "ladder" section or the error, and the ledger's rows."""
    from ladder.emit.config import SECTION, best_config, plain_summary

    best, found = done.result.best_so_far, first_fit(done.result.space, done.result.records)
    document: dict[str, Any] = {
        "answer": best_config(done.answer)[SECTION] if done.answer else None,
        "plain": plain_summary(done.plain) if done.plain else None,
        **(_failure(failure) if failure else {}),
        "best_so_far": best.candidate_key if best else None,
        "recipe_first_fit": found.plain() if found else None,
        "script_as_it_stands": plain_as_it_stands(done.result.space, done.result.records),
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
    """The JSON document for stdout if there is no result, so that there always is one."""
    return json.dumps(_failure(error), indent=2)


def _failure(error: LadderError) -> dict[str, Any]:
    return {"error": str(error), "exit_code": error.exit_code}
