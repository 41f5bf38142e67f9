"""`ladder export`: the answer in the words of another training program."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ladder.errors import EXIT_FOUND, UsageError
from ladder.text import shown


class Target(str, Enum):
    trainer = "trainer"
    accelerate = "accelerate"
    deepspeed = "deepspeed"
    axolotl = "axolotl"
    llama_factory = "llama-factory"
    trl = "trl"
    torchrun = "torchrun"
    sbatch = "sbatch"


def export(
    config: Annotated[Path, typer.Argument(help="A best_config.json.")] = Path("best_config.json"),
    target: Annotated[Target, typer.Option("--for", help="Which program.")] = Target.trainer,
    output: Annotated[
        Path | None, typer.Option(help="The file to write. [default: stdout]", show_default=False)
    ] = None,
) -> int:
    """Write the same answer for the Trainer, accelerate, DeepSpeed, axolotl, LLaMA-Factory, TRL, torchrun or sbatch.

    Examples:

      ladder export best_config.json --for axolotl

      ladder export best_config.json --for sbatch --output job.sh
    """
    from ladder.emit.config import load_best_config
    from ladder.emit.exporters.registry import exported
    from ladder.emit.files import require_file_name, write_atomically

    if output is not None:
        require_file_name(output, "exported.yaml")
        if output.resolve() == config.resolve():
            raise UsageError(f"--output {shown(output)} is the answer itself, which is kept; name another file.")
    text = exported(load_best_config(config), config, target.value)
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_atomically(output, text, mode=0o777 if text.startswith("#!") else 0o666)
        typer.echo(f"Wrote {output}")
    return EXIT_FOUND
