"""The options of a plan and of a comparison of plans: those of a workload, and a machine that need not be there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from ladder.options.declaring import Option
from ladder.options.generation import GenerationOptions
from ladder.options.kinds import SIZE, above_zero, whole
from ladder.options.tune import MACHINE, MOST_GPUS, OUTPUT, Allowed, Switched, WorkloadOptions, machine_names


@dataclass(frozen=True, kw_only=True)
class PaperOptions(WorkloadOptions):
    """A machine on paper, and what is tried there."""

    gpu_memory: Annotated[
        int | None, Option("Memory of one GPU, e.g. 80GiB.", MACHINE, SIZE, unset="as much as --machine has")
    ] = None
    host_memory: Annotated[int | None, Option("Host memory that the ranks may use together.", MACHINE, SIZE)] = None
    machine: Annotated[
        str | None,
        Option("One of `ladder machines`, or a YAML file.", MACHINE, metavar="NAME|FILE", names=machine_names),
    ] = None
    switches: Switched = field(default_factory=dict)
    """As `TuneOptions.switches`; techniques that are missing are not tried."""
    allow: Allowed = ()


@dataclass(frozen=True, kw_only=True)
class PlanOptions(GenerationOptions, PaperOptions):
    """The options of a plan."""

    gpus: Annotated[
        int | None, Option("How many GPUs.", MACHINE, whole(1, MOST_GPUS), unset="as many as --machine has")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(PaperOptions):
    """The options of a comparison."""

    gpus: Annotated[str, Option("The numbers of GPUs to compare, separated by commas.", MACHINE, metavar="N,N,…")] = (
        "1,2,4,8"
    )
    price: Annotated[float | None, Option("What a GPU-hour costs, in any currency.", OUTPUT, above_zero())] = None
