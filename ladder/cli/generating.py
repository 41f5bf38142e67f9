"""What `ladder tune` and `ladder plan` print with `--task generate`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from ladder.cli.console import stdout_console
from ladder.errors import EXIT_FOUND, LadderError, UsageError
from ladder.generating.ways import GENERATE

if TYPE_CHECKING:
    from ladder.cli.plan import PlanShown
    from ladder.cli.tune import Logged, TuneShown
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
        _print_json(done) if as_json else _print(done)
        return interruption.exit_code if interruption() else EXIT_FOUND


def _print_json(done: Generated) -> None:
    answer = json.loads(done.files[0].read_text()) if done.files else None
    files, run_dir = [str(path) for path in done.files], str(done.run_dir.resolve())
    typer.echo(json.dumps({"answer": answer, "files": files, "run_dir": run_dir}, indent=2))


def _print(done: Generated) -> None:
    _say(f"{name}: left out, {why}." for name, why in done.left_out.items())
    if done.answer is not None:
        _say(done.answer.sentences())
    for verb, paths in (("Wrote", done.files), ("Kept what another tune wrote, or was edited, as", done.kept)):
        _say([f"{verb} {', '.join(map(str, paths))}"] if paths else [])


def plan_generation(options: PlanOptions, view: PlanShown) -> int:
    """`ladder plan MODEL --task generate`: each way's memory, and whether it fits."""
    from ladder.emit.generation import SERVING
    from ladder.tuning.generation import plan_of_generation
    from ladder.tuning.watch.plain import say
    from ladder.units import counted, format_bytes

    problem, rows = plan_of_generation(options, say)
    prompts = min(problem.batches, default=1)
    if view.output_format == "json":
        about = {
            "model": problem.workload.model.name,
            "gpus": problem.machine.world_size,
            "dtype": problem.workload.dtype,
        }
        lengths = {"batch": prompts, "prompt_len": problem.prompt_len, "new_tokens": problem.new_tokens}
        typer.echo(json.dumps({**about, **lengths, "ways": rows}, indent=2))
        return EXIT_FOUND
    about_it = (
        f"{problem.workload.model.name} on {counted(problem.machine.world_size, 'GPU')} of {format_bytes(problem.machine.memory_limit)}; "
        f"{problem.workload.dtype}, {counted(prompts, 'prompt')} of {problem.prompt_len} tokens at once, "
        f"{problem.new_tokens} new ones each. Predicted GiB on the GPU that holds most; host memory of all ranks."
    )
    _say([about_it])
    parts = ("weights", "gathered", "cache", "prompt", "outside", "device", "host")
    cells = [(row["way"], row["fits"], *(f"{row[f'{part}_gib']:.2f}" for part in parts)) for row in rows]
    _table(("way", "fits", *parts), cells)
    _say([*(f"{row['way']}: {row['why']}." for row in rows if row["why"]), SERVING])
    return EXIT_FOUND


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    stdout_console().print(table)


def _say(sentences: Iterable[str]) -> None:
    console = stdout_console()
    for sentence in sentences:
        console.print(sentence, soft_wrap=not console.is_terminal, markup=False, highlight=False)
