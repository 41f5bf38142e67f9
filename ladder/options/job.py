"""The options of Slurm jobs that ladder writes (`ladder sbatch`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from ladder.errors import UsageError
from ladder.options.declaring import Option
from ladder.options.kinds import Kind, text_of, whole
from ladder.text import shown
from ladder.units import GIB

JOB = "Slurm job"
_BESIDE_RANKS = 8 * GIB
"""Host memory for ladder and its trial server, beside what --host-memory gives to the ranks. Chosen."""
_REQUEUES = 10
"""Chosen: a tune of hours ends within a few jobs of an hour, and one that never ends must not fill the queue."""
_TIME = r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}"
_OWN = frozenset(
    {
        *("array", "chdir", "comment", "error", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode"),
        *("output", "requeue", "no-requeue", "signal", "wait", "wrap", "parsable", "export", "input", "test-only"),
        *("cluster", "clusters", "quiet", "hold", "help", "version", "usage"),
    }
)
"""Options of sbatch that ladder sets itself, or that would change what it relies on."""


def _word(wanted: str, pattern: str = r"[A-Za-z0-9][A-Za-z0-9._,:=/@+-]*") -> Kind:
    """A value for a line of #SBATCH: one word, so that it cannot end the line."""

    def read(value: Any) -> str:
        if not re.fullmatch(pattern, text_of(value)):
            raise ValueError(f"{shown(repr(value))} is not valid; give {wanted}")
        return str(value)

    return Kind(read=read, typed=str, metavar="TEXT")


_ONE = _word("one word")
_LIMIT = _word("one like 02:00:00", _TIME)
_MEMORY = _word("one like 400G", r"\d+[KMGT]?")
_OPTION = _word("one like constraint=a100 or exclusive", r"[a-z][a-z0-9-]*(=[A-Za-z0-9][A-Za-z0-9._,:=/@+&|*-]*)?")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a job asks of Slurm, how it is written, and where."""

    account: Annotated[str | None, Option("The account that pays.", JOB, _ONE)] = None
    partition: Annotated[str | None, Option("The partition.", JOB, _ONE)] = None
    time: Annotated[
        str | None, Option("The time limit, in Slurm's words: 90 (minutes), 02:00:00 or 1-12.", JOB, _LIMIT)
    ] = None
    mem: Annotated[
        str | None, Option("Host memory of a node, e.g. 400G.", JOB, _MEMORY, unset="--host-memory and 8 GiB")
    ] = None
    cpus_per_task: Annotated[int | None, Option("Cores of a node.", JOB, whole(1))] = None
    gpus_per_node: Annotated[
        str | None, Option("GPUs of a node, if Slurm wants a type too: a100:8.", JOB, _ONE, unset="--gpus")
    ] = None
    job_options: Annotated[
        tuple[str, ...],
        Option(
            "One more option of sbatch, such as constraint=a100 or exclusive. May be given several times.",
            JOB,
            _OPTION,
            flag="--job-option",
            metavar="NAME[=VALUE]",
        ),
    ] = ()
    requeues: Annotated[int, Option("If its time is up, the job queues itself again up to N times.", JOB, whole(0))] = (
        _REQUEUES
    )
    template: Annotated[
        Path | None, Option("A template of your own, such as one with your cluster's modules.", JOB, unset="built in")
    ] = None
    print_template: Annotated[bool, Option("Print the built-in template, to edit it.", JOB)] = False
    job_file: Annotated[Path | None, Option("The file to write.", JOB, unset="stdout")] = None


def mem_of(options: JobOptions, host_memory: int | None, nodes: int) -> str:
    """Host memory of a node as Slurm reads it; empty if nobody said how much. `host_memory` is of all nodes."""
    return options.mem or (f"{-(-(host_memory // nodes + _BESIDE_RANKS) // GIB)}G" if host_memory else "")


def require_known(options: JobOptions) -> None:
    """UsageError for a further option of sbatch that ladder sets itself."""
    known = [field.name.replace("_", "-") for field in fields(JobOptions)]
    for text in options.job_options:
        name = text.partition("=")[0]
        if name in known:
            raise UsageError(f"--job-option {shown(text)}: give it as --{name}.")
        if name in _OWN:
            raise UsageError(f"--job-option {shown(text)} is what ladder decides itself; leave it out.")
