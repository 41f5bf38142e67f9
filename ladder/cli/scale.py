"""`ladder scale`: what more GPUs bring, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ladder.cli.declared import takes
from ladder.errors import EXIT_FOUND
from ladder.options.declaring import Option, checked
from ladder.options.plan import ScaleOptions
from ladder.options.tune import OUTPUT

if TYPE_CHECKING:
    from ladder.tuning.scaling import ScalePoint


@dataclass(frozen=True, kw_only=True)
class ScaleShown:
    """How the command prints its result."""

    output_format: Annotated[Literal["table", "json"], Option("How to print the result.", OUTPUT, flag="--format")] = (
        "table"
    )


@takes(ScaleOptions, ScaleShown)
def scale(options: ScaleOptions, shown: ScaleShown) -> int:
    """Compare numbers of GPUs: the best configuration, speed, memory and cost of each, as `ladder plan` predicts them.

    80 % of speeds should lie in the range that is shown. The global batch is the same for all numbers.

    Examples:

      ladder scale llama-2-7b --gpus 4,8,16 --machine a100-80

      ladder scale llama-2-7b --gpus 1,2,4 --gpu-memory 80GiB --price 2.5
    """
    from ladder.tuning.scaling import as_json, scale_of
    from ladder.watch.plain import say

    options = checked(options)
    points = scale_of(options, say)
    if shown.output_format == "json":
        typer.echo(json.dumps(as_json(options, points), indent=2))
    else:
        _print(points)
    return EXIT_FOUND


def _print(points: Sequence[ScalePoint]) -> None:
    from rich.table import Table

    from ladder.cli.console import stdout_console

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    costs = ["cost/1e9"] if any(point.cost is not None for point in points) else []
    for name in ("GPUs", "tokens/s", "10–90 %", "eff.", "GiB", *costs):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("configuration", overflow="fold")
    for point in points:
        table.add_row(
            str(point.gpus),
            _number(point.tokens_per_second, ",.0f"),
            f"{point.low:,.0f}–{point.high:,.0f}" if point.low and point.high else "",
            _number(point.efficiency, ".0%"),
            _number(point.device_gib, ".1f"),
            *[_number(point.cost, ",.2f") for _ in costs],
            f"{point.candidate or 'nothing fits'}{'' if point.is_sure else ' (may fit)'}",
        )
    stdout_console().print(table)


def _number(value: float | None, digits: str) -> str:
    return "" if value is None else format(value, digits)
