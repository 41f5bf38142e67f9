"""What `ladder tune` and `ladder plan` print with `--task generate`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from ladder.cli.console import stdout_console
from ladder.emit.generation import SERVING
from ladder.errors import EXIT_FOUND, UsageError
from ladder.units import counted, format_bytes

if TYPE_CHECKING:
    from ladder.cli.plan import PlanShown
    from ladder.cli.tune import TuneShown
    from ladder.options.plan import PlanOptions
    from ladder.options.tune import TuneOptions
    from ladder.tuning.interruption import Interruption


def tune_generation(options: TuneOptions, view: TuneShown, interruption: Interruption) -> int:
    """`ladder tune MODEL --task generate`."""
    from ladder.tuning.generation import run_generation
    from ladder.tuning.tune_events import ignore
    from ladder.watch.plain import plain_lines

    if view.web:
        raise UsageError("--web has no effect on generating; leave it out.")
    done = run_generation(options, ignore if view.quiet else plain_lines, interruption)
    if view.output_format == "json":
        answer = json.loads(done.files[0].read_text()) if done.files else None
        typer.echo(json.dumps({"answer": answer, "files": [*map(str, done.files)], "run_dir": str(done.run_dir)}))
    else:
        _say(f"{name}: left out, {why}." for name, why in done.left_out.items())
        _say(done.answer.sentences() if done.answer is not None else ())
        for verb, paths in (("Wrote", done.files), ("Kept what another tune wrote, or was edited, as", done.kept)):
            _say([f"{verb} {', '.join(map(str, paths))}"] if paths else [])
    return interruption.exit_code if interruption() else EXIT_FOUND


def plan_generation(options: PlanOptions, view: PlanShown) -> int:
    """`ladder plan MODEL --task generate`: each way's memory, and whether it fits."""
    from rich.table import Table

    from ladder.tuning.generation import plan_of_generation
    from ladder.watch.plain import say

    problem, rows = plan_of_generation(options, say)
    prompts, machine, workload = min(problem.batches, default=1), problem.machine, problem.workload
    if view.output_format == "json":
        about = {"model": workload.model.name, "gpus": machine.world_size, "dtype": workload.dtype, "batch": prompts}
        lengths = {"prompt_len": problem.prompt_len, "new_tokens": problem.new_tokens}
        typer.echo(json.dumps({**about, **lengths, "ways": rows}, indent=2))
        return EXIT_FOUND
    gpus = f"{counted(machine.world_size, 'GPU')} of {format_bytes(machine.memory_limit)}"
    at_once = f"{counted(prompts, 'prompt')} of {problem.prompt_len} tokens at once, {problem.new_tokens} new ones each"
    unit = "Predicted GiB on the GPU that holds most; host memory of all ranks."
    _say([f"{workload.model.name} on {gpus}; {workload.dtype}, {at_once}. {unit}"])
    parts = ("weights", "gathered", "cache", "prompt", "outside", "device", "host")
    table = Table("way", box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("fits", *parts):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["way"], row["fits"], *(f"{row[f'{part}_gib']:.2f}" for part in parts))
    stdout_console().print(table)
    _say([*(f"{row['way']}: {row['why']}." for row in rows if row["why"]), SERVING])
    return EXIT_FOUND


def _say(sentences: Iterable[str]) -> None:
    console = stdout_console()
    for sentence in sentences:
        console.print(sentence, soft_wrap=not console.is_terminal, markup=False, highlight=False)
