"""What `ladder tune` and `ladder plan` print with `--task generate`."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import typer

from ladder.cli.console import stdout_console
from ladder.errors import EXIT_FOUND, LadderError, UsageError
from ladder.generating.ways import GENERATE
from ladder.text import shown

if TYPE_CHECKING:
    from ladder.cli.plan import PlanShown
    from ladder.cli.tune import Logged, TuneShown
    from ladder.generating.ways import Generation
    from ladder.tuning.generation import Generated
    from ladder.tuning.options import TuneOptions
    from ladder.tuning.plan_options import PlanOptions


def tune_generation(options: TuneOptions, logged: Logged, view: TuneShown) -> int:
    """`ladder tune MODEL --task generate`."""
    from ladder.cli.tune_result import error_as_json
    from ladder.machine.lease import InterruptedWaitError
    from ladder.tuning.generation import run_generation
    from ladder.tuning.interruption import interruptible
    from ladder.tuning.tune_events import ignore
    from ladder.tuning.watch.plain import plain_lines

    as_json = view.output_format == "json"
    with interruptible() as interruption:
        try:
            if view.web or logged.log_to is not None:
                raise UsageError(f"--web and --log-to have no effect with --task {GENERATE}; leave them out.")
            done = run_generation(options, ignore if view.quiet else plain_lines, interruption)
        except InterruptedWaitError:
            return interruption.exit_code
        except LadderError as error:
            if as_json:
                typer.echo(error_as_json(error))
            raise
        if as_json:
            typer.echo(json.dumps(_document(done), indent=2))
        else:
            _print(done)
        return interruption.exit_code if interruption() else EXIT_FOUND


def _document(done: Generated) -> dict[str, Any]:
    files = [str(path) for path in done.files]
    answer = json.loads(done.files[0].read_text()) if done.files else None
    return {"answer": answer, "files": files, "run_dir": str(done.run_dir.resolve()), "left_out": done.left_out}


def _print(done: Generated) -> None:
    from rich.table import Table

    console = stdout_console()
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("way", "batch", "tokens/s", "GiB", "outcome", "why"):
        table.add_column(name, justify="left" if name in ("way", "outcome", "why") else "right")
    for each in done.tried:
        if each.proof:
            continue
        speed = memory = ""
        if each.figures is not None and done.answer is not None:
            speed = f"{each.tokens_per_second(done.answer.problem.new_tokens):,.1f}"
            memory = f"{max(each.figures.devices) / (1 << 30):.2f}"
        table.add_row(each.way, str(each.batch), speed, memory, each.kind, shown(each.sentence))
    for name, why in done.left_out.items():
        table.add_row(name, "", "", "", "left out", shown(why))
    console.print(table)
    if done.answer is not None:
        for sentence in done.answer.sentences():
            console.print(sentence, soft_wrap=not console.is_terminal, markup=False, highlight=False)
    for verb, paths in (("Wrote", done.files), ("Kept what another tune wrote, or was edited, as", done.kept)):
        if paths:
            console.print(f"{verb} {', '.join(shlex.quote(str(path)) for path in paths)}", soft_wrap=True, markup=False)


def plan_generation(options: PlanOptions, view: PlanShown) -> int:
    """`ladder plan MODEL --task generate`: each way's memory, and whether it fits."""
    from ladder.emit.generation import SERVING
    from ladder.tuning.generation_plan import plan_of_generation
    from ladder.tuning.watch.plain import say
    from ladder.units import counted, format_bytes

    problem, rows = plan_of_generation(options, say)
    if view.output_format == "json":
        typer.echo(json.dumps(_plan(problem, rows), indent=2))
        return EXIT_FOUND
    from rich.table import Table

    console = stdout_console()
    console.print(
        f"{problem.model.name} on {counted(problem.world_size, 'GPU')} of {format_bytes(problem.memory_limit)}; "
        f"{problem.workload.dtype}, {counted(rows[0]['batch'], 'prompt')} of {problem.prompt_len} tokens at once, "
        f"{problem.new_tokens} new ones each. Predicted GiB on the GPU that holds most; host memory of all ranks.",
        soft_wrap=not console.is_terminal,
        markup=False,
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    columns = ("fits", "weights", "gathered", "cache", "prompt", "outside", "device", "host")
    table.add_column("way", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        figures = [f"{row[f'{name}_gib']:.2f}" for name in columns[1:]]
        table.add_row(row["way"], row["fits"], *figures, style="" if row["fits"] == "yes" else "dim")
    console.print(table)
    for row in rows:
        if row["why"]:
            console.print(f"{row['way']}: {row['why']}.", soft_wrap=not console.is_terminal, markup=False)
    console.print(SERVING, soft_wrap=not console.is_terminal, markup=False)
    return EXIT_FOUND


def _plan(problem: Generation, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": problem.model.name,
        "gpus": problem.world_size,
        "dtype": problem.workload.dtype,
        "prompt_len": problem.prompt_len,
        "new_tokens": problem.new_tokens,
        "ways": rows,
    }
