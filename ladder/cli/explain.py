"""`ladder explain`: the ledger of a tune, and why a rung is not its answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ladder.errors import EXIT_FOUND, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from ladder.search.ledger import Entry

_RUNS = Path("ladder-runs")


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
    from ladder.cli.stored_run import read_run
    from ladder.search.ledger import ledger
    from ladder.search.why import why_not
    from ladder.tuning.options import check_rungs

    if why is not None:
        check_rungs([why])
    stored = read_run(run if run is not None else newest_run())
    entries = ledger(stored.space, stored.records, stored.unsupported)
    if why is not None:
        try:
            typer.echo(why_not(why, entries, stored.space))
        except ValueError as error:
            raise UsageError(f"{error}; it was tuned with other --rung options.") from None
        return EXIT_FOUND
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table(entries))
    counts = {name: sum(_status(entry) == name for entry in entries) for name in ("measured", "predicted", "pruned")}
    counts["measured"] += sum(entry.status == "answer" for entry in entries)
    typer.echo(", ".join(f"{number} {name}" for name, number in counts.items()))
    return EXIT_FOUND


def newest_run() -> Path:
    """The run under ./ladder-runs that was written last. UsageError where there is none."""
    folders = [path.parent for path in _RUNS.glob("*/journal.log")]
    if not folders:
        raise UsageError(f"There is no run under ./{_RUNS}; name the run folder, or start `ladder tune` first.")
    return max(folders, key=lambda folder: (folder / "journal.log").stat().st_mtime)


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
            {True: "on", False: "off", None: ""}[entry.gradient_checkpointing],
            str(entry.micro_batch or ""),
            _status(entry),
            speed,
            memory,
            entry.record.trial if entry.record else "",
            escape(entry.why),
            style={"answer": "bold green", "measured": ""}.get(_status(entry), "dim"),
        )
    return table


def _status(entry: Entry) -> str:
    return "predicted" if entry.predicted is not None else entry.status


def _figures(entry: Entry) -> tuple[str, str]:
    """Tokens/s and GiB: what was measured, or with ~ the middle and the ends of what is predicted."""
    if entry.predicted is not None:
        speed, memory = entry.predicted, entry.predicted
        return f"~{speed.low:,.0f}–{speed.high:,.0f}", f"~{memory.peak / 2**30:.1f}–{memory.upper / 2**30:.1f}"
    if entry.record is None or entry.record.measurement is None:
        return "", ""
    return f"{entry.record.tokens_per_second or 0:,.0f}", f"{entry.record.measurement.peak_device / 2**30:.1f}"
