"""`ladder scale`: what more GPUs bring, and what they cost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ladder.cli.declared import takes
from ladder.errors import EXIT_FOUND
from ladder.tuning.declaring import Option, checked
from ladder.tuning.options import OUTPUT
from ladder.tuning.scale_options import ScaleOptions
from ladder.units import counted

if TYPE_CHECKING:
    from ladder.tuning.scale_points import ScalePoint, ScaleResult

_WIDE = 110
"""From this width on, the table names the whole configuration."""


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
            _print(found)
        return interruption.exit_code if interruption() else EXIT_FOUND


def _print(found: ScaleResult) -> None:
    from rich.table import Table

    from ladder.cli.console import stdout_console

    console = stdout_console()
    is_wide = console.width >= _WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("GPUs", "source"):
        table.add_column(name, no_wrap=True, justify="right" if name == "GPUs" else "left")
    if is_wide:
        table.add_column("configuration", overflow="fold")
    priced = found.price is not None
    powered = any(point.joules_per_token for point in found.points)
    for name in ("tokens/s", "10–90 %", "eff.", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, is_known in (("J/token", powered), ("cost/1e9", priced)):
        if is_known:
            table.add_column(name, justify="right", no_wrap=True)
    for point in found.points:
        more = [_number(point.joules_per_token, ".3f")] if powered else []
        more += [_number(point.cost, ",.2f")] if priced else []
        table.add_row(*_cells(point, is_wide=is_wide), *more)
    console.print(table)
    lines = [] if is_wide else [f"{counted(p.gpus, 'GPU')}: {p.candidate}" for p in found.points if p.candidate]
    lines += list(found.left_out.values())
    fewest = f"The fewest of these that fit: {found.smallest}." if found.smallest else "None of these surely fits."
    lines.append(f"{fewest} {found.verdict}".rstrip())
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal, markup=False, highlight=False)


def _cells(point: ScalePoint, *, is_wide: bool) -> list[str]:
    span = f"{point.low:,.0f}–{point.high:,.0f}" if point.low and point.high else ""
    source = {"none": "nothing fits"}.get(point.source, point.source)
    return [
        str(point.gpus),
        source if point.is_sure else f"{source}, may fit",
        *([point.candidate or ""] if is_wide else []),
        _number(point.tokens_per_second, ",.0f"),
        span,
        "" if point.efficiency is None else f"{point.efficiency:.0%}",
        _number(point.device_gib, ".1f"),
    ]


def _number(value: float | None, digits: str) -> str:
    return "" if value is None else format(value, digits)
