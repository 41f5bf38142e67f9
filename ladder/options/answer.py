"""The options of the commands that take an answer: `verify` and `run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ladder.options.declaring import Option
from ladder.options.kinds import above_zero, number, whole
from ladder.options.tune import MACHINE, PROOF, WORKLOAD, RanksPython

OtherCommand = Annotated[
    tuple[str, ...],
    Option(
        "One word of your own script's command. Simpler: put the command behind `--`.",
        WORKLOAD,
        metavar="WORD",
        unset="the command that was tuned",
    ),
]
"""In the place of the script that was tuned."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The options of a verification."""

    script: OtherCommand = ()
    steps: Annotated[int | None, Option("Time this many whole optimizer steps.", PROOF, whole(1))] = None
    minutes: Annotated[
        float | None, Option("Train for this long, in whole optimizer steps: a soak test.", PROOF, above_zero())
    ] = None
    tolerance: Annotated[
        float,
        Option(
            "How much slower than promised still holds, as a fraction.",
            PROOF,
            number(0, 0.99, metavar="FRACTION"),
        ),
    ] = 0.05
    hostfile: Annotated[
        Path | None, Option("The hosts of an answer for several nodes. Without it, those of the Slurm job.", MACHINE)
    ] = None
    launcher: Annotated[
        Literal["local", "ray"], Option("ray: an answer for several nodes runs on a Ray cluster.", MACHINE)
    ] = "local"
    python: RanksPython = ""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What the user asked of a run of their own script."""

    script: OtherCommand = ()
    step_down: Annotated[
        bool,
        Option(
            "If memory runs out, go on from the last checkpoint with a measured candidate that takes less.", WORKLOAD
        ),
    ] = False
    memory_limit: Annotated[
        bool, Option("Keep the training within the tune's --gpu-memory (the default).", MACHINE)
    ] = True
    python: RanksPython = ""
