"""`ladder plan`: what to expect of a model on some GPUs, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ladder.cli import workload_options as ask
from ladder.errors import EXIT_FOUND, UsageError
from ladder.units import format_bytes, gib

if TYPE_CHECKING:
    from ladder.candidates import Technique
    from ladder.search.forecast import Plan, RungPlan
    from ladder.search.space import Space
    from ladder.simulation.paper_machine import SimulatedMachine
    from ladder.workload.workload import Dtype, OptimizerName, Task, Workload

_NO_LIMIT = 1 << 60
_MOST_GPUS = 1024


class Format(str, Enum):
    table = "table"
    json = "json"


def plan(
    model: Annotated[str, typer.Argument(help="A Hub id, a folder, a config.json, or a bundled shape.")],
    gpus: Annotated[int | None, typer.Option(min=1, max=_MOST_GPUS, help="How many; default: the machine's.")] = None,
    gpu_memory: Annotated[int | None, ask.size_option("Of one GPU, e.g. 80GiB; default: the machine's.")] = None,
    machine: Annotated[str | None, typer.Option(help="A bundled machine, e.g. a100-80, or a YAML file.")] = None,
    host_memory: ask.HostMemory = None,
    seq_len: ask.SeqLen = None,
    global_batch_size: ask.GlobalBatchSize = None,
    dtype: ask.Dtype = ask.DtypeName.bf16,
    optimizer: ask.Optimizer = ask.OptimizerChoice.adamw,
    task: ask.Task = None,
    liger: Annotated[
        bool, typer.Option("--liger/--no-liger", help="On Liger's kernels, which keep no logits.", show_default=False)
    ] = False,
    output_format: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.table,
) -> int:
    """Predict memory by part for each rung, what fits, on how many GPUs, and how long a tune would take.

    Needs no GPU. Memory is what has to be held; where there is room, the allocator keeps up to 40 % more. Speed is a
    first guess: steps of small models and small micro-batches, which wait for their host, may take twice as long.
    Without --machine or --host-memory, the host's memory is taken to be enough, and an NVMe drive to be there.

    Examples:

      ladder plan llama-2-7b --gpus 4 --gpu-memory 80GiB

      ladder plan llama-2-13b --machine a100-40 --format json
    """
    made, space = plan_of(
        model,
        gpus=gpus,
        gpu_memory=gpu_memory,
        machine=machine,
        host_memory=host_memory,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        dtype=dtype.value,
        optimizer=optimizer.value,
        task=task.value if task else None,
        liger=liger,
    )
    if output_format is Format.json:
        typer.echo(json.dumps(as_json(made, space), indent=2))
    else:
        _print(made, space)
    return EXIT_FOUND


def plan_of(
    model: str,
    *,
    gpus: int | None = None,
    gpu_memory: int | None = None,
    machine: str | None = None,
    host_memory: int | None = None,
    seq_len: int | None = None,
    global_batch_size: int | None = None,
    dtype: Dtype = "bf16",
    optimizer: OptimizerName = "adamw",
    task: Task | None = None,
    liger: bool = False,
) -> tuple[Plan, Space]:
    """What is expected of each rung, and of which space; sizes in bytes. UsageError where too little is given."""
    from ladder.search.forecast import plan as make_plan
    from ladder.tuning.consent import Consent, techniques_tried
    from ladder.tuning.problem import workload_of
    from ladder.workload.source import resolve_model

    if gpus is not None and not 1 <= gpus <= _MOST_GPUS:
        raise UsageError(f"--gpus {gpus} cannot be planned for; give 1 to {_MOST_GPUS}.")
    simulated = _machine(machine, gpus, gpu_memory)
    world_size = gpus or (simulated.num_gpus if simulated else 1)
    shape = resolve_model(model, task=task)
    if shape.note:
        _note(shape.note)
    workload = workload_of(
        shape,
        world_size,
        _note,
        task=task,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        dtype=dtype,
        optimizer=optimizer,
    )
    techniques = techniques_tried(Consent(switches={"liger": liger}), workload, "cuda", on_paper=True)
    space = _space(workload, world_size, simulated, gpu_memory, host_memory, techniques=techniques)
    per_node = simulated.num_gpus if simulated is not None and host_memory is None else None
    return make_plan(space, per_node), space


def _machine(name: str | None, gpus: int | None, gpu_memory: int | None) -> SimulatedMachine | None:
    if name is None:
        missing = [option for option, value in (("--gpus", gpus), ("--gpu-memory", gpu_memory)) if value is None]
        if missing:
            raise UsageError(f"Give {' and '.join(missing)}, or a --machine such as a100-80.")
        return None
    from ladder.simulation.paper_machine import read_machine

    simulated = read_machine(name)
    if gpu_memory is not None and gpu_memory > simulated.gpu_memory:
        raise UsageError(
            f"--gpu-memory {format_bytes(gpu_memory)} is more than {simulated.name} has "
            f"({format_bytes(simulated.gpu_memory)}); leave one of them out."
        )
    return simulated


def _note(text: str) -> None:
    typer.echo(text, err=True)


def _space(
    workload: Workload,
    world_size: int,
    simulated: SimulatedMachine | None,
    gpu_memory: int | None,
    host_memory: int | None,
    *,
    techniques: Sequence[Technique],
) -> Space:
    from ladder.candidates import RUNGS, Problem
    from ladder.tuning.consent import ways_of_checkpointing
    from ladder.tuning.problem import make_space, micro_batches_of

    nodes = -(-world_size // simulated.num_gpus) if simulated else 1
    has_nvme = simulated is None or simulated.nvme_space > 0
    problem = Problem(
        workload=workload,
        world_size=world_size,
        device="cuda",
        memory_limit=gpu_memory or (simulated.gpu_memory if simulated else 0),
        host_memory=host_memory or (simulated.host_memory * nodes if simulated else _NO_LIMIT),
        gpu_name=simulated.gpu_name if simulated else None,
        num_cores=simulated.num_cores * nodes if simulated else 16 * world_size,
        num_nodes=nodes,
    )
    return make_space(
        problem,
        [rung for rung in RUNGS if has_nvme or "nvme" not in rung.devices],
        micro_batches_of(workload, world_size, None),
        techniques=techniques,
        checkpointing=ways_of_checkpointing(version("transformers")),
    )


def _row(row: RungPlan) -> dict[str, Any]:
    memory, candidate = row.outlook.memory, row.outlook.candidate
    return {
        "rung": candidate.engine.name,
        "fits": row.fits,
        "checkpointing": candidate.checkpointing,
        "micro_batch": candidate.micro_batch,
        **{f"{part}_gib": gib(num_bytes) for part, num_bytes in asdict(memory.parts).items()},
        "peak_gib": gib(memory.peak),
        "upper_gib": gib(memory.upper),
        "host_gib": gib(memory.host),
        "pinned_gib": gib(memory.pinned),
        "tokens_per_second": round(row.outlook.speed.tokens_per_second),
        "smallest_gpus": row.smallest,
    }


def as_json(made: Plan, space: Space) -> dict[str, Any]:
    """The plan as plain values: GiB, seconds, tokens/s."""
    return {
        "model": space.workload.model.name,
        "gpus": space.world_size,
        "gpu_memory_gib": gib(space.memory_limit),
        "host_memory_gib": gib(space.host_memory) if space.host_memory < _NO_LIMIT else None,
        "seq_len": space.workload.seq_len,
        "global_batch_size": space.workload.global_batch_size,
        "rungs": [_row(row) for row in made.rungs],
        "tune_seconds": [round(made.least_seconds), round(made.most_seconds)],
        "remedies": None if made.most_seconds else _remedies(space),
    }


def _remedies(space: Space) -> dict[str, Any]:
    from ladder.search.remedies import remedies

    sizes = ("gpu_memory", "host_memory", "lora", "qlora")
    found = remedies(space).plain()
    return {
        f"{key}_gib" if key in sizes else key: gib(value) if key in sizes and value else value
        for key, value in found.items()
    }


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
    for row in map(_row, made.rungs):
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
