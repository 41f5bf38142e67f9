"""`ladder tune`: finds the fastest configuration that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from ladder.cli.declared import takes
from ladder.errors import EXIT_FOUND, LadderError
from ladder.generating.ways import GENERATE
from ladder.options.declaring import Option
from ladder.options.tune import OUTPUT, OutputFormat, TuneOptions


@dataclass(frozen=True, kw_only=True)
class TuneShown:
    """How the command shows its progress and its result."""

    quiet: Annotated[bool, Option("Show no progress, only the result.", OUTPUT, short="-q")] = False
    web: Annotated[bool, Option("Show the tune in a page at localhost too, while it runs.", OUTPUT)] = False
    output_format: Annotated[
        OutputFormat,
        Option("json: print one document on stdout, and all else on stderr.", OUTPUT, flag="--format"),
    ] = "text"


@takes(TuneOptions, TuneShown)
def tune(options: TuneOptions, shown: TuneShown) -> int:
    """Find the fastest DeepSpeed configuration that fits, and write best_config.json.

    If you interrupt it, the same command continues where it stopped.

    Examples:

      ladder tune tiny-llama

      ladder tune meta-llama/Llama-2-7b-hf --gpus 8

      ladder tune meta-llama/Llama-3.2-1B --gpu-memory 24GiB --global-batch-size 64

      ladder tune llama-2-7b --launcher simulated --machine a100-40

      ladder tune --gpus 2 -- train.py --lr 1e-5

      ladder tune meta-llama/Llama-2-7b-hf --task generate --gpus 2
    """
    from ladder.cli import tune_result
    from ladder.machine.lease import InterruptedWaitError
    from ladder.tuning.answering import why_none
    from ladder.tuning.interruption import interruptible
    from ladder.tuning.run import run_tune
    from ladder.watch import watching

    as_json = shown.output_format == "json"
    with interruptible() as interruption:
        try:
            if options.task == GENERATE:
                from ladder.cli.generating import tune_generation

                return tune_generation(options, shown, interruption)
            with watching(quiet=shown.quiet, web=shown.web) as view:
                done = run_tune(options, view, interruption)
        except InterruptedWaitError:
            return interruption.exit_code
        except LadderError as error:
            if as_json:
                typer.echo(tune_result.error_as_json(error))
            raise
        failure = why_none(done.result) if not (done.answer or done.plain) and not interruption() else None
        if as_json:
            typer.echo(tune_result.as_json(done, failure))
        else:
            tune_result.print_result(done, quiet=shown.quiet)
        if interruption():
            return interruption.exit_code
    if failure is not None:
        raise failure
    return EXIT_FOUND
