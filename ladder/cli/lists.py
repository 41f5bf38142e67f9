"""`ladder runs`, `ladder models` and `ladder machines`: lists of past tunes, bundled models and bundled machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ladder.cli.declared import takes
from ladder.errors import EXIT_FOUND, LadderError
from ladder.options.declaring import Option
from ladder.options.tune import OUTPUT

if TYPE_CHECKING:
    from ladder.report.run_data import ReportedRun


_FIGURES = ("parameters", "layers", "positions", "GiB each", "host GiB", "cores", "NVMe GiB", "tokens/s")
_WIDE = 120
"""Columns of a terminal from which on a run's date and machine are shown. Chosen by eye."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """How a list is printed."""

    output_format: Annotated[Literal["table", "json"], Option("How to print the list.", OUTPUT, flag="--format")] = (
        "table"
    )


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which runs are listed."""

    words: Annotated[
        tuple[str, ...],
        Option(
            "Only runs of which all these words are said: a model, a GPU, a rung, …", flag="WORDS", is_argument=True
        ),
    ] = ()
    compare: Annotated[bool, Option("Show the runs side by side, with all that is known of each.")] = False


@takes(Wanted, Listed)
def runs(wanted: Wanted, listed: Listed) -> int:
    """List the tunes under ./ladder-runs, the newest first: when, of what, on what, and their answers.

    Examples:

      ladder runs

      ladder runs llama h100 --format json

      ladder runs opt-125m --compare
    """
    from ladder.cli.explain import runs_here
    from ladder.cli.report import read_reported_run
    from ladder.report.run_data import named_apart
    from ladder.report.summary import comparison
    from ladder.text import in_short_lines

    rows, found = [], []
    for folder in runs_here():
        try:
            run = read_reported_run(folder)
        except LadderError as error:
            typer.echo(f"Left out: {error}", err=True)
            continue
        row = _row(run)
        if all(word.lower() in " ".join(map(str, row.values())).lower() for word in wanted.words):
            rows.append(row)
            found.append(run)
    if wanted.compare:
        facts = comparison(apart := named_apart(found))
        side_by_side = {run.name: [fact["values"][place] for fact in facts] for place, run in enumerate(apart)}
        return _print(facts, {"": [fact["name"] for fact in facts], **side_by_side}, listed)
    if not rows and listed.output_format == "table":
        typer.echo(f"No tune under ./ladder-runs has {' and '.join(wanted.words) or 'a result'}.")
        return EXIT_FOUND
    columns: dict[str, list[Any]] = {
        "run": [row["run"] for row in rows],
        "when": [row["date"].removesuffix(" UTC") or "–" for row in rows],
        "on": [row["machine"] for row in rows],
        "answer": ["\n".join(map(in_short_lines, row["answer"].split(" ", 1))) for row in rows],
        "tokens/s": [f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "–" for row in rows],
        "it is": [row["state"] for row in rows],
    }
    return _print(rows, columns, listed)


def _row(run: ReportedRun) -> dict[str, Any]:
    from ladder.report.summary import introduction
    from ladder.tuning.stored import is_running

    best = run.best
    proven = "simulated" if run.simulated else "proven" if run.answer else "not proven"
    return {
        "run": str(run.folder),
        "date": run.about.get("date", ""),
        "model": run.space.workload.model.name,
        "machine": introduction(run)["where"].removesuffix(", simulated").removesuffix(" each"),
        "answer": best.candidate_key if best else "nothing fits",
        "tokens_per_second": best.tokens_per_second if best else None,
        "state": "running" if is_running(run.folder) else proven,
        "command": run.about.get("command", ""),
    }


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
    console = stdout_console()
    if console.width < _WIDE:
        columns = {title: values for title, values in columns.items() if title not in ("when", "on")}
    for title in columns:
        table.add_column(
            title, justify="right" if title in _FIGURES else "left", no_wrap=title not in ("also known as", "on")
        )
    for values in zip(*columns.values(), strict=True):
        table.add_row(*map(str, values))
    console.print(table)
    return EXIT_FOUND
