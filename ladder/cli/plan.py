"""`ladder plan`: what to expect of a model on some GPUs, without a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ladder.cli.declared import takes
from ladder.errors import EXIT_FOUND
from ladder.tuning.declaring import Option, checked
from ladder.tuning.options import OUTPUT, PlanOptions
from ladder.units import format_bytes

if TYPE_CHECKING:
    from ladder.search.forecast import Plan
    from ladder.search.space import Space


@dataclass(frozen=True, kw_only=True)
class Shown:
    """How the command prints the plan."""

    output_format: Annotated[Literal["table", "json"], Option("How to print the plan.", OUTPUT, flag="--format")] = (
        "table"
    )


@takes(PlanOptions, Shown)
def plan(options: PlanOptions, shown: Shown) -> int:
    """Predict memory by part for each rung, what fits, on how many GPUs, and how long a tune would take.

    Needs no GPU. Memory is what has to be held; where there is room, the allocator keeps up to 40 % more. Speed is a
    first guess: steps of small models and small micro-batches, which wait for their host, may take twice as long.
    Without --machine or --host-memory, the host's memory is taken to be enough, and an NVMe drive to be there.

    Examples:

      ladder plan llama-2-7b --gpus 4 --gpu-memory 80GiB

      ladder plan llama-2-13b --machine a100-40 --format json
    """
    from ladder.tuning.planning import as_json, plan_of
    from ladder.tuning.watch.plain import say

    made, space = plan_of(checked(options), say)
    if shown.output_format == "json":
        typer.echo(json.dumps(as_json(made, space), indent=2))
    else:
        _print(made, space)
    return EXIT_FOUND


_COLUMNS = {
    "fits": "fits",
    "ckpt": "checkpointing",
    "mb": "micro_batch",
    "parameters": "parameters_gib",
    "gradients": "gradients_gib",
    "optimizer": "optimizer_gib",
    "activ.": "activations_gib",
    "logits": "logits_gib",
    "buffers": "buffers_gib",
    "outside": "outside_torch_gib",
    "peak": "peak_gib",
    "host": "host_gib",
    "GPUs needed": "smallest_gpus",
}
_IN_LESS = {name: _COLUMNS[name] for name in ("fits", "ckpt", "mb", "peak", "host", "GPUs needed")}
_IN_SHORT = {"fits": "fits", "peak": "peak_gib", "GPUs": "smallest_gpus"}
_NARROW, _WIDE = 80, 145


def _cell(value: Any) -> str:
    if value is None:  # of the GPUs needed
        return ">1024"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _print(made: Plan, space: Space) -> None:
    from rich.table import Table

    from ladder.cli.console import stdout_console
    from ladder.text import in_short_lines
    from ladder.tuning.planning import rung_row

    model, gpus = space.workload.model, "1 GPU" if space.world_size == 1 else f"{space.world_size} GPUs"
    typer.echo(
        f"{model.name}, {model.num_parameters / 1e9:.3g} billion parameters, on {gpus} of "
        f"{format_bytes(space.memory_limit)}; sequence length {space.workload.seq_len}, global batch "
        f"{space.workload.global_batch_size}. Predicted GiB per GPU; host memory of all ranks."
    )
    console = stdout_console()
    narrow = console.width < _NARROW
    shown = _COLUMNS if console.width >= _WIDE else _IN_SHORT if narrow else _IN_LESS
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rung", no_wrap=True)
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for row in map(rung_row, made.rungs):
        table.add_row(
            in_short_lines(row["rung"]) if narrow else row["rung"],
            *(_cell(row[key]) for key in shown.values()),
            style={"no": "dim", "perhaps": "yellow"}.get(row["fits"], ""),
        )
    console.print(table)
    if shown is not _COLUMNS:
        typer.echo("Memory by part: on a wider terminal, or with --format json.")
    if made.most_seconds:
        typer.echo(f"A tune would take about {_minutes(made.least_seconds)} to {_minutes(made.most_seconds)} minutes.")
    else:
        from ladder.search.remedies import remedies

        typer.echo(f"Nothing is predicted to fit. {remedies(space).sentence()}".rstrip())


def _minutes(seconds: float) -> str:
    return f"{max(1.0, seconds / 60):.0f}"
