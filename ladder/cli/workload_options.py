"""What is trained, as options: `ladder plan` and `ladder tune` ask for it in the same words."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from ladder.units import parse_bytes


class TaskName(str, Enum):
    causal = "causal-lm"
    masked = "masked-lm"
    seq2seq = "seq2seq-lm"


class DtypeName(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"


class OptimizerChoice(str, Enum):
    adamw = "adamw"
    adam = "adam"
    sgd = "sgd"


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def size_option(help: str) -> Any:
    """An option for bytes, written like `80GiB`."""
    return typer.Option(parser=_size, metavar="SIZE", help=help)


Task = Annotated[TaskName | None, typer.Option(help="Default: what the model is made for.")]
SeqLen = Annotated[int | None, typer.Option(min=2, help="Tokens of a sequence; default min(2048, the model's).")]
GlobalBatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Sequences per optimizer step over all GPUs. [default: 128, or the next number that divides over them]",
    ),
]
Dtype = Annotated[DtypeName, typer.Option()]
Optimizer = Annotated[OptimizerChoice, typer.Option()]
HostMemory = Annotated[int | None, size_option("Host memory the ranks may use together.")]
