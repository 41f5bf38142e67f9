"""`ladder tune`: find the fastest configuration that fits."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ladder.cli import workload_options as ask
from ladder.errors import EXIT_FOUND, LadderError


class LauncherName(str, Enum):
    local = "local"
    simulated = "simulated"


class OutputFormat(str, Enum):
    text = "text"
    json = "json"


class TrackerChoice(str, Enum):
    trackio = "trackio"
    wandb = "wandb"
    mlflow = "mlflow"


class StrategyName(str, Enum):
    auto = "auto"
    exhaustive = "exhaustive"
    walk = "walk"
    reverse = "reverse"
    bisect = "bisect"


def _duration(text: str) -> float:
    """Seconds of `90s`, `15m` or `2h`. A bare number could be minutes or seconds, and is refused."""
    factors = {"s": 1.0, "m": 60.0, "h": 3600.0}
    try:
        seconds = float(text[:-1]) * factors[text[-1:]]
    except (ValueError, KeyError):
        raise typer.BadParameter(f"{text!r} is not a duration; write it like 15m, 90s or 2h") from None
    if not seconds > 0:
        raise typer.BadParameter("a duration must be above zero")
    return seconds


def tune(
    model: Annotated[str, typer.Argument(help="A Hub id, a folder, a config.json, or a bundled shape (tiny-llama).")],
    gpus: Annotated[int | None, typer.Option(min=0, help="How many; default all visible; 0 is CPU.")] = None,
    task: ask.Task = None,
    seq_len: ask.SeqLen = None,
    global_batch_size: ask.GlobalBatchSize = None,
    dtype: ask.Dtype = ask.DtypeName.bf16,
    optimizer: ask.Optimizer = ask.OptimizerChoice.adamw,
    gradient_clipping: Annotated[float, typer.Option(min=0.0, help="Maximal gradient norm; 0 is none.")] = 1.0,
    gpu_memory: Annotated[
        int | None, ask.size_option("Tune for smaller cards, e.g. 40GiB: all that NVML counts.")
    ] = None,
    host_memory: ask.HostMemory = None,
    nvme_path: Annotated[
        Path | None, typer.Option(help="A folder on a fast NVMe drive; without it, no NVMe rungs.")
    ] = None,
    time_budget: Annotated[
        float | None,
        typer.Option(parser=_duration, metavar="TIME", help="Search no longer, e.g. 15m; the proof comes on top."),
    ] = None,
    strategy: Annotated[StrategyName, typer.Option(help="How to search.")] = StrategyName.auto,
    tolerance: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="auto: how much faster than the answer an untried one may be.")
    ] = 0.02,
    audit: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, metavar="SHARE", help="auto: measure this share of what it ruled out, to check it."
        ),
    ] = 0.0,
    knobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=200,
            metavar="N",
            help="Then try N settings of the winner's DeepSpeed knobs. [default: 12 with --time-budget, else 0]",
            show_default=False,
        ),
    ] = None,
    liger: Annotated[
        bool | None,
        typer.Option(
            "--liger/--no-liger",
            help="Try each rung on Liger's kernels too. [default: where liger-kernel is installed]",
            show_default=False,
        ),
    ] = None,
    documented: Annotated[
        bool,
        typer.Option(
            "--documented/--no-documented",
            help="Only the documented ladder, and nothing that lies beyond it.",
            show_default=False,
        ),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Try what trains with other numerics too, or asks something of your script: bf16-states, adam-8bit, "
            "ulysses; may be repeated.",
        ),
    ] = None,
    rung: Annotated[list[str] | None, typer.Option(help="Only this rung; may be given several times.")] = None,
    micro_batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Only this micro-batch; may be given several times.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the history lives. [default: ./ladder-runs/…]")] = None,
    output: Annotated[Path, typer.Option(help="The answer; its companions are written beside it.")] = Path(
        "best_config.json"
    ),
    save_weights: Annotated[
        Path | None, typer.Option(help="Let the proof also write the gathered weights here.")
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold/--no-cold", help="Start every trial from nothing; slower.", show_default=False)
    ] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait", help="Wait for GPUs that another tune or somebody's process uses.", show_default=False
        ),
    ] = False,
    launcher: Annotated[
        LauncherName, typer.Option(help="simulated: on a --machine that exists on paper; nothing is run.")
    ] = LauncherName.local,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="For --launcher simulated: a100-80, h100-80, … or a file.")
    ] = None,
    log_to: Annotated[
        TrackerChoice | None, typer.Option(help="Log each candidate to a tracker: `pip install wandb`.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet/--no-quiet", "-q", help="No progress; only the answer.", show_default=False)
    ] = False,
    output_format: Annotated[
        OutputFormat, typer.Option("--format", help="json: one document on stdout, all else on stderr.")
    ] = OutputFormat.text,
) -> int:
    """Find the fastest DeepSpeed configuration that fits, and write best_config.json.

    Started again, the same command goes on where it was.

    Examples:

      ladder tune tiny-llama

      ladder tune meta-llama/Llama-2-7b-hf --gpus 8

      ladder tune meta-llama/Llama-3.2-1B --gpu-memory 24GiB --global-batch-size 64

      ladder tune llama-2-7b --launcher simulated --machine a100-40
    """
    from ladder.cli import tune_result
    from ladder.machine.lease import InterruptedWaitError
    from ladder.tuning.answering import why_none
    from ladder.tuning.interruption import interruptible
    from ladder.tuning.options import TuneOptions, checked
    from ladder.tuning.run import run_tune
    from ladder.tuning.trackers import tracking
    from ladder.tuning.watch import watching

    options = TuneOptions(
        model=model,
        gpus=gpus,
        task=task.value if task else None,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        dtype=dtype.value,
        optimizer=optimizer.value,
        gradient_clipping=gradient_clipping,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        nvme_path=nvme_path,
        time_budget=time_budget,
        strategy=strategy.value,
        tolerance=tolerance,
        liger=liger,
        documented=documented,
        allow=tuple(allow or ()),
        rungs=tuple(rung or ()),
        micro_batches=tuple(micro_batch or ()),
        run_dir=run_dir,
        output=output,
        save_weights=save_weights,
        cold=cold,
        wait=wait,
        audit=audit,
        knobs=knobs,
        launcher=launcher.value,
        machine=machine,
    )
    as_json = output_format is OutputFormat.json
    with interruptible() as interruption:
        try:
            options = checked(options)  # before a tracker opens a run
            tracker = log_to.value if log_to else None
            with tracking(tracker, options) as tracked, watching(quiet=quiet) as shown:
                done = run_tune(options, tracked.beside(shown), interruption)
        except InterruptedWaitError:
            return interruption.exit_code
        except LadderError as error:
            if as_json:
                typer.echo(tune_result.error_as_json(error))
            raise
        failure = why_none(done.result) if done.answer is None and not interruption() else None
        if as_json:
            typer.echo(tune_result.as_json(done, failure))
        else:
            tune_result.print_result(done, quiet=quiet)
        if interruption():
            return interruption.exit_code
    if failure is not None:
        raise failure
    return EXIT_FOUND
