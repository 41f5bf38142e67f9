"""The options of `ladder scale`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from ladder.errors import UsageError
from ladder.tuning.declaring import Option
from ladder.tuning.option_kinds import DURATION, SIZE, above_zero
from ladder.tuning.options import (
    MACHINE,
    MOST_GPUS,
    OUTPUT,
    SEARCH,
    Allowed,
    Switched,
    WorkloadOptions,
    machine_names,
)


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(WorkloadOptions):
    """What is compared."""

    gpus: Annotated[str, Option("The numbers of GPUs to compare, separated by commas.", MACHINE, metavar="N,N,…")] = (
        "1,2,4,8"
    )
    gpu_memory: Annotated[int | None, Option("Memory of one GPU, e.g. 80GiB.", MACHINE, SIZE)] = None
    launcher: Annotated[
        Literal["local", "simulated"], Option("simulated: tune every number on a simulator of --machine.", MACHINE)
    ] = "local"
    machine: Annotated[
        str | None,
        Option("One of `ladder machines`, or a YAML file.", MACHINE, metavar="NAME|FILE", names=machine_names),
    ] = None
    trials: Annotated[bool, Option("Tune the numbers of GPUs that this machine has.", SEARCH)] = True
    time_budget: Annotated[float | None, Option("Tune each number no longer than this.", SEARCH, DURATION)] = None
    switches: Switched = field(default_factory=dict)
    """As `TuneOptions.switches`; predictions use only those that were given."""
    allow: Allowed = ()
    price: Annotated[float | None, Option("What a GPU-hour costs, in any currency.", OUTPUT, above_zero())] = None
    output: Annotated[Path, Option("The folder for the answers and histories of the tunes.", OUTPUT)] = Path(
        "ladder-scale"
    )


def counts_in(text: str) -> list[int]:
    """The numbers in `1,2,4`, in ascending order. UsageError for anything else."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 1 <= int(word[:9]) <= MOST_GPUS for word in words):
        raise UsageError(f"--gpus: {text[:60]!r} is not valid; give numbers from 1 to {MOST_GPUS}, such as 1,2,4,8.")
    return sorted(set(map(int, words)))
