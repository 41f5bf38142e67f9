"""`ladder scale`: what more GPUs bring, and what they cost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ladder.cli.declared import takes
from ladder.errors import EXIT_FOUND
from ladder.tuning.declaring import Option, checked
from ladder.tuning.options import OUTPUT
from ladder.tuning.scale_options import ScaleOptions
from ladder.units import counted

if TYPE_CHECKING:
    from ladder.report.scale_points import ScaleResult

_WIDE = 110
"""From this width on, the table names the whole configuration."""
_CONFIGURATION = "configuration"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """How the command prints its result."""

    quiet: Annotated[bool, Option("Show no progress, only the result.", OUTPUT, short="-q")] = False
    output_format: Annotated[Literal["table", "json"], Option("How to print the result.", OUTPUT, flag="--format")] = (
        "table"
    )


@takes(ScaleOptions, Shown)
def scale(options: ScaleOptions, shown: Shown) -> int:
    """Compare numbers of GPUs: the best configuration, speed, memory, energy and cost of each.

    Numbers that this machine has are tuned, or taken from --runs. The others are predicted, from the smaller ones if
    these were measured; 80 % of such predictions should lie between the two speeds that are shown. The global batch is
    the same for all numbers.

    Examples:

      ladder scale llama-2-7b --gpus 1,2,4,8,16 --price 2.5

      ladder scale llama-2-7b --gpus 4,8,16 --machine a100-80 --no-trials

      ladder scale llama-2-7b --gpus 8,16 --runs ladder-runs/my-tune
    """
    from ladder.tuning.interruption import interruptible
    from ladder.tuning.scaling import scale_of
    from ladder.tuning.watch import watching

    options = checked(options)
    with interruptible() as interruption:
        with watching(quiet=shown.quiet) as tell:
            found = scale_of(options, tell, interruption)
        if shown.output_format == "json":
            typer.echo(json.dumps(found.plain(), indent=2))
        else:
            _print(found, options.report)
        return interruption.exit_code if interruption() else EXIT_FOUND


def _print(found: ScaleResult, report: Path) -> None:
    from rich.table import Table

    from ladder.cli.console import stdout_console
    from ladder.report.scale_points import rows_of

    console = stdout_console()
    is_wide = console.width >= _WIDE
    titles, rows = rows_of(found)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in titles:
        if name == _CONFIGURATION and is_wide:
            table.add_column(name, overflow="fold")
        elif name != _CONFIGURATION:
            table.add_column(name, justify="left" if name == "source" else "right", no_wrap=True)
    configuration = titles.index(_CONFIGURATION)
    for row in rows:
        table.add_row(*(row if is_wide else [*row[:configuration], *row[configuration + 1 :]]))
    console.print(table)
    lines = [] if is_wide else [f"{counted(p.gpus, 'GPU')}: {p.candidate}" for p in found.points if p.candidate]
    lines += list(found.left_out.values())
    lines.append(f"{found.fewest_sentence} {found.verdict}".rstrip())
    lines += [f"Wrote {report.absolute()}"] if report.exists() else []  # otherwise a note has said why
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal, markup=False, highlight=False)
