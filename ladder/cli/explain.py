"""`ladder explain`: the ledger of a tune, and why a rung is not its answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ladder.errors import EXIT_FOUND, UsageError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ladder.search.ledger import Entry

_RUNS = Path("ladder-runs")
_NARROW = 120


def explain(
    run: Annotated[
        Path | None, typer.Argument(help="A run folder. [default: the newest under ./ladder-runs]", show_default=False)
    ] = None,
    why: Annotated[
        str | None, typer.Option(metavar="RUNG", help="One sentence: why is this rung not the answer?")
    ] = None,
) -> int:
    """Say of every candidate whether it was measured, predicted or pruned, why, and in which trial.

    Examples:

      ladder explain

      ladder explain ladder-runs/tiny-llama-0123456789ab --why zero2
    """
    from ladder.report.run_data import is_simulated
    from ladder.report.summary import SIMULATED, and_knobs, tried
    from ladder.runs.stored_run import read_run
    from ladder.search.ledger import ledger
    from ladder.search.why import why_not
    from ladder.tuning.options import check_rungs

    if why is not None:
        check_rungs([why], "--why", or_engines=True)
    stored = read_run(run if run is not None else newest_run())
    on_paper = is_simulated(stored.facts)
    entries = ledger(stored.space, stored.records, stored.unsupported, on_paper=on_paper)
    if why is not None:
        try:
            typer.echo(why_not(why, entries, stored.space))
        except ValueError as error:
            raise UsageError(f"{error}; it was tuned with other options for rungs and techniques.") from None
        if on_paper:
            typer.echo(SIMULATED)
        return EXIT_FOUND
    from ladder.cli.console import stdout_console

    console = stdout_console()
    for part in [_table(entries)] if console.width >= _NARROW else map(_lines, entries):
        console.print(part)
    num_tried, num_knobs = tried(stored.space, stored.records)
    counts = {name: sum(entry.status == name for entry in entries) for name in ("predicted", "pruned", "refused")}
    untried = [f"{number} {name}" for name, number in counts.items() if number or name != "refused"]
    typer.echo(", ".join([f"{num_tried} measured{and_knobs(num_knobs)}", *untried]))
    if on_paper:
        typer.echo(SIMULATED)
    return EXIT_FOUND


def newest_run() -> Path:
    """The run under ./ladder-runs that was tuned last. UsageError where there is none."""
    folders = [path.parent for path in _RUNS.glob("*/journal.log")]
    if not folders:
        raise UsageError(f"There is no run under ./{_RUNS}; name the run folder, or start `ladder tune` first.")
    return max(folders, key=_last_tuned)


def _last_tuned(folder: Path) -> float:
    """When a tune last began there or added to it: one that finds everything in its history writes only its lock."""
    files = (folder / "journal.log", folder / "lock")
    return max(file.stat().st_mtime for file in files if file.exists())


def _table(entries: list[Entry]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rung", "ckpt", "mb", "status", "tokens/s", "GiB", "trial"):
        table.add_column(name, justify="right" if name in ("mb", "tokens/s", "GiB") else "left", no_wrap=True)
    table.add_column("why", ratio=1)
    for entry in entries:
        speed, memory = _figures(entry)
        table.add_row(
            entry.rung,
            entry.checkpointing,
            str(entry.micro_batch or ""),
            entry.status,
            speed,
            memory,
            entry.record.trial if entry.record else "",
            escape(entry.why),
            style=_style(entry),
        )
    return table


def _lines(entry: Entry) -> Group:
    """The same without columns, where a terminal has no room for them."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    head = f"{entry.candidate_key or entry.rung}: {entry.status}"
    if entry.record is not None:
        speed, memory = _figures(entry)
        head += f", {speed} tokens/s, {memory} GiB" if speed else ""
        head += f", trial {entry.record.trial}"
    why = Padding(Text(entry.why), (0, 0, 0, 2), style=_style(entry))
    return Group(Text(head, _style(entry)), why)


def _style(entry: Entry) -> str:
    return {"answer": "bold green", "measured": ""}.get(entry.status, "dim")


def _figures(entry: Entry) -> tuple[str, str]:
    """Tokens/s and GiB: what was measured, or with ~ the middle and the ends of what is predicted."""
    if entry.predicted is not None:
        speed, memory = entry.predicted, entry.predicted
        return f"~{speed.low:,.0f}–{speed.high:,.0f}", f"~{memory.peak / 2**30:.1f}–{memory.upper / 2**30:.1f}"
    if entry.record is None or entry.record.measurement is None:
        return "", ""
    return f"{entry.record.tokens_per_second or 0:,.0f}", f"{entry.record.measurement.peak_device / 2**30:.1f}"
