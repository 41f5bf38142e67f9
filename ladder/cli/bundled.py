"""`ladder models` and `ladder machines`: lists of the bundled models and machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from ladder.cli.declared import takes
from ladder.errors import EXIT_FOUND
from ladder.tuning.declaring import Option
from ladder.tuning.options import OUTPUT


@dataclass(frozen=True, kw_only=True)
class Listed:
    """How a list is printed."""

    output_format: Annotated[Literal["table", "json"], Option("How to print the list.", OUTPUT, flag="--format")] = (
        "table"
    )


@takes(Listed)
def models(listed: Listed) -> int:
    """List the bundled models: shapes that can be tuned and planned by name, without the Hub.

    Any other causal language model of the Hub works too, by its id or from a folder with its config.json.

    Examples:

      ladder models

      ladder models --format json
    """
    from ladder.units import parameters_in_words
    from ladder.workload.source import bundled_models, hub_ids, resolve_model

    rows: list[dict[str, Any]] = []
    for name in bundled_models():
        shape = resolve_model(name)
        rows.append(
            {
                "name": name,
                "parameters": shape.num_parameters,
                "layers": shape.num_layers,
                "positions": shape.max_positions,
                "hub_ids": hub_ids(name),
            }
        )
    columns: dict[str, list[Any]] = {
        "model": [row["name"] for row in rows],
        "parameters": [parameters_in_words(row["parameters"]).removesuffix(" parameters") for row in rows],
        "layers": [row["layers"] for row in rows],
        "positions": [row["positions"] or "any" for row in rows],
        "also known as": [", ".join(row["hub_ids"]) for row in rows],
    }
    return _print(rows, columns, listed)


@takes(Listed)
def machines(listed: Listed) -> int:
    """List the bundled machines, for `ladder plan --machine` and for simulated tunes.

    A machine of your own is a YAML file with the same keys; `--machine FILE` takes it.

    Examples:

      ladder machines

      ladder machines --format json
    """
    from ladder.simulation.paper_machine import machine_files, read_machine
    from ladder.units import GIB, gib

    known = {name: read_machine(name) for name in machine_files()}
    rows = [
        {
            "name": name,
            "gpu": machine.gpu_name,
            "gpus": machine.num_gpus,
            "gpu_memory_gib": gib(machine.gpu_memory),
            "host_memory_gib": gib(machine.host_memory),
            "cores": machine.num_cores,
            "nvme_gib": gib(machine.nvme_space),
        }
        for name, machine in known.items()
    ]
    columns: dict[str, list[Any]] = {
        "machine": list(known),
        "GPUs": [f"{machine.num_gpus} × {machine.gpu_name}" for machine in known.values()],
        "GiB each": [f"{machine.gpu_memory / GIB:.1f}" for machine in known.values()],
        "host GiB": [f"{machine.host_memory / GIB:,.0f}" for machine in known.values()],
        "cores": [machine.num_cores for machine in known.values()],
        "NVMe GiB": [f"{machine.nvme_space / GIB:,.0f}" if machine.nvme_space else "–" for machine in known.values()],
    }
    return _print(rows, columns, listed)


def _print(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Sequence[Any]], listed: Listed) -> int:
    """Print `rows` as JSON, or `columns` as a table with words left-aligned and figures right-aligned."""
    if listed.output_format == "json":
        typer.echo(json.dumps(rows, indent=2))
        return EXIT_FOUND
    from rich.table import Table

    from ladder.cli.console import stdout_console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in columns:
        is_words = title in ("model", "machine", "GPUs", "also known as")
        table.add_column(title, justify="left" if is_words else "right", no_wrap=title != "also known as")
    for values in zip(*columns.values(), strict=True):
        table.add_row(*map(str, values))
    stdout_console().print(table)
    return EXIT_FOUND
