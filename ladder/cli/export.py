"""`ladder export`: writes the answer in the format of another training program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ladder.cli.declared import takes
from ladder.emit.exporters.registry import EXPORTERS
from ladder.errors import EXIT_FOUND, UsageError
from ladder.options.declaring import Option
from ladder.options.kinds import one_of
from ladder.text import shown


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What to export, and where to."""

    config: Annotated[Path, Option("A best_config.json.", is_argument=True)] = Path("best_config.json")
    target: Annotated[str, Option("Which program.", kind=one_of(EXPORTERS), flag="--for")] = "trainer"
    output: Annotated[Path | None, Option("The file to write.", unset="stdout")] = None


@takes(Exported)
def export(asked: Exported) -> int:
    """Write the same answer for the Trainer, accelerate, DeepSpeed, axolotl, LLaMA-Factory, TRL, torchrun or sbatch.

    Examples:

      ladder export best_config.json --for axolotl

      ladder export best_config.json --for sbatch --output job.sh
    """
    from ladder.emit.config import load_best_config
    from ladder.emit.exporters.registry import exported
    from ladder.emit.files import require_file_name, write_atomically

    output = asked.output
    if output is not None:
        require_file_name(output, "exported.yaml")
        if output.resolve() == asked.config.resolve():
            raise UsageError(f"--output {shown(output)} would replace the answer; name another file.")
    text = exported(load_best_config(asked.config), asked.config, asked.target)
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_atomically(output, text, mode=0o777 if text.startswith("#!") else 0o666)
        typer.echo(f"Wrote {output}")
    return EXIT_FOUND
