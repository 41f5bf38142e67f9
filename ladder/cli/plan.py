"""`ladder plan`: predicts what fits and how fast it is, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ladder.cli.declared import takes
from ladder.errors import EXIT_FOUND
from ladder.generating.ways import GENERATE
from ladder.options.declaring import Option, checked
from ladder.options.plan import PlanOptions
from ladder.options.tune import OUTPUT
from ladder.units import GIB, counted, format_bytes, parameters_in_words
from ladder.workload.trained import said_of_training

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ladder.search.forecast import Plan
    from ladder.search.space import Space


@dataclass(frozen=True, kw_only=True)
class PlanShown:
    """How the command prints the plan."""

    output_format: Annotated[Literal["table", "json"], Option("How to print the plan.", OUTPUT, flag="--format")] = (
        "table"
    )


@takes(PlanOptions, PlanShown)
def plan(options: PlanOptions, shown: PlanShown) -> int:
    """Predict memory by part for each rung, what fits, on how many GPUs, and how long a tune would take.

    The expected winner is the fastest rung that is predicted to fit; of several that may fit, only a tune can tell.

    Needs no GPU. The memory is what a rung has to hold; where there is room, the allocator keeps up to 40 % more.
    The speed is a first guess: steps of small models and small micro-batches may take twice as long, because the GPU
    waits for its host. Without --machine or --host-memory, plan assumes enough host memory and an NVMe drive.

    Examples:

      ladder plan llama-2-7b --gpus 4 --gpu-memory 80GiB

      ladder plan llama-2-13b --machine a100-40 --format json

      ladder plan llama-2-13b --task generate --gpus 2 --gpu-memory 24GiB
    """
    from ladder.tuning.planning import as_json, plan_of
    from ladder.watch.plain import say

    if options.task == GENERATE:
        from ladder.cli.generating import plan_generation

        return plan_generation(checked(options), shown)

    made, space = plan_of(checked(options), say)
    if shown.output_format == "json":
        typer.echo(json.dumps(as_json(made, space), indent=2))
    else:
        _print(made, space)
    return EXIT_FOUND


_MEMORY = {
    "weights": "parameters_gib",
    "grads": "gradients_gib",
    "optim.": "optimizer_gib",
    "activ.": "activations_gib",
    "logits": "logits_gib",
    "buffer": "buffers_gib",
    "other": "outside_torch_gib",
}
_BAR = "memory"
_BAR_CELLS = 10
"""Of the bar, for a GPU's whole memory. Chosen: what 80 columns leave."""
_IN_LESS = {
    "fits": "fits",
    "ckpt": "checkpointing",
    "mb": "micro_batch",
    "tokens/s": "tokens_per_second",
    _BAR: "",
    "peak": "peak_gib",
    "host": "host_gib",
    "GPUs": "smallest_gpus",
}
_COLUMNS = {**dict(list(_IN_LESS.items())[:4]), **_MEMORY, **dict(list(_IN_LESS.items())[5:])}
_IN_SHORT = {name: _IN_LESS[name] for name in ("fits", "peak", "GPUs")}
_LEGEND = "GPUs: the fewest on which the rung fits."
_LETTERS = (
    "memory: weights, grads, optimizer, activations, logits, buffers, x for what is outside PyTorch; "
    f"{_BAR_CELLS} letters are all of a GPU. In GiB: on a wider terminal, or with --format json."
)
_ELSEWHERE = "Memory by part: on a wider terminal, or with --format json."
_PARTS = "activ.: what the forward pass keeps for the backward pass. other: CUDA, NCCL and all else outside PyTorch."
_STYLES = {"no": "dim", "perhaps": "yellow"}


def _cell(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if value is None:  # of the GPUs needed
        return ">1024"
    if key == "tokens_per_second":
        return f"{value:,}" if row["fits"] != "no" else ""
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _bar(row: Mapping[str, Any], limit: float) -> str:
    """The memory of a GPU by part, a letter for each tenth of `limit` GiB; `>` where it needs more."""
    bar, filled = "", 0.0
    for part, key in _MEMORY.items():
        filled += row[key]
        letter = "x" if part == "other" else part[0]
        bar += letter * (round(_BAR_CELLS * filled / limit) - len(bar))
    return bar if len(bar) <= _BAR_CELLS else f"{bar[: _BAR_CELLS - 1]}>"


def _print(made: Plan, space: Space) -> None:
    from ladder.cli.console import stdout_console
    from ladder.search.remedies import remedies
    from ladder.tuning.planning import expected_winner, rung_row

    model, gpus = space.workload.model, counted(space.world_size, "GPU")
    about = (
        f"{model.name}, {parameters_in_words(model.num_parameters)}{said_of_training(space.workload)}, on {gpus} of "
        f"{format_bytes(space.memory_limit)}; {space.workload.dtype}, sequence length {space.workload.seq_len}, "
        f"global batch {space.workload.global_batch_size}. Predicted GiB per GPU; host memory of all ranks."
    )
    console = stdout_console()
    _say(console, about)
    shown, table = next(
        (columns, table)
        for columns in (_COLUMNS, _IN_LESS, _IN_SHORT)
        if _width(console, table := _table(made, columns, space.memory_limit / GIB)) <= console.width
        or columns is _IN_SHORT
    )
    console.print(table)
    _say(console, f"{_LEGEND} {_PARTS if shown is _COLUMNS else _LETTERS if shown is _IN_LESS else _ELSEWHERE}")
    winner = expected_winner(made)
    if winner is None:
        _say(console, f"Nothing is predicted to fit. {remedies(space).sentence()}".rstrip())
        return
    values = rung_row(winner)
    _say(
        console,
        f"Expected winner: {values['rung']} with checkpointing {values['checkpointing']} and micro-batch "
        f"{values['micro_batch']}, about {values['tokens_per_second']:,} tokens/s.",
    )
    if made.tune is not None:
        _say(console, f"A tune would take {made.tune.sentence()}.")


def _table(made: Plan, columns: Mapping[str, str], limit: float) -> Table:
    """`limit` is a GPU's memory in GiB."""
    from rich.table import Table

    from ladder.text import in_short_lines
    from ladder.tuning.planning import expected_winner, rung_row

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("rung", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="left" if name == _BAR else "right", no_wrap=True)
    winner = expected_winner(made)
    for row in made.rungs:
        values = rung_row(row)
        table.add_row(
            in_short_lines(values["rung"]) if columns is _IN_SHORT else values["rung"],
            *(_cell(values, key) if key else _bar(values, limit) for key in columns.values()),
            style="bold green" if row is winner else _STYLES.get(values["fits"], ""),
        )
    return table


def _width(console: Console, table: Table) -> int:
    """The width of the whole table in columns."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(max_width=1_000), table).maximum


def _say(console: Console, text: str) -> None:
    """Print a paragraph: on one line in a file, wrapped on a terminal."""
    console.print(text, soft_wrap=not console.is_terminal, markup=False, highlight=False)
