"""Nodes of a Slurm allocation, on which srun starts programs as steps of the job."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ladder.errors import EnvironmentFaultError
from ladder.launch.nodes.connection import Node

_ANSWER_SECONDS = 30.0
"""For Slurm's own commands. Chosen: a busy controller answers within seconds."""


def is_in_allocation(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process belongs to a Slurm job, so that srun can start steps."""
    return "SLURM_JOB_ID" in environment and "SLURM_JOB_NODELIST" in environment


def slurm_nodes(count: int, environment: Mapping[str, str] = os.environ) -> list[Node]:
    """The first `count` nodes of this job. EnvironmentFaultError if it has fewer, or if Slurm does not answer."""
    return nodes_among(hostnames(environment["SLURM_JOB_NODELIST"]), count, environment)


def hostnames(listed: str) -> list[str]:
    """The names in Slurm's `node[1-2]`, in its order. EnvironmentFaultError if Slurm does not answer."""
    return _scontrol("show", "hostnames", listed).split()


def nodes_among(names: Sequence[str], count: int, environment: Mapping[str, str]) -> list[Node]:
    """As `slurm_nodes`, where the job's nodes are known to be `names`."""
    job, listed = environment["SLURM_JOB_ID"], environment["SLURM_JOB_NODELIST"]
    if len(names) < count:
        raise EnvironmentFaultError(
            f"--nodes {count} asks for more than the {len(names)} of Slurm job {job} ({listed}); use --nodes "
            f"{len(names)}, or ask Slurm for more."
        )
    cores = _cores_by_node(environment.get("SLURM_JOB_CPUS_PER_NODE", ""), len(names))
    return [_node(name, job, of_node) for name, of_node in zip(names[:count], cores, strict=False)]


def _node(name: str, job: str, cores: int | None) -> Node:
    def command(program: Sequence[str]) -> list[str]:
        # Since Slurm 22.05 a step has one core unless it asks for more, whatever the job has.
        share = [f"--cpus-per-task={cores}"] if cores else []
        place = [f"--nodelist={name}", "--nodes=1", "--ntasks=1", "--mem=0", *share]
        return ["srun", f"--jobid={job}", "--overlap", "--kill-on-bad-exit=1", "--unbuffered", *place, *program]

    def end(step: str) -> None:
        if step:
            with suppress(OSError, subprocess.SubprocessError):
                # What it says is of no use to the user: the step may have ended, or its node may be gone.
                words = ["scancel", "--quiet", "--signal=KILL", f"{job}.{step}"]
                subprocess.run(words, timeout=_ANSWER_SECONDS, check=False, capture_output=True)

    return Node(name=name, command=command, end=end)


def _scontrol(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise EnvironmentFaultError(
            f"Slurm does not answer ({said.strip()}); check `scontrol ping`, then start the same command again."
        ) from None
    return done.stdout


def _cores_by_node(described: str, count: int) -> list[int | None]:
    """By node, from Slurm's `16(x2),8`; None for each if that cannot be read."""
    cores: list[int | None] = []
    for part in described.split(","):
        if (found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)) is None:
            return [None] * count
        cores += [int(found[1])] * int(found[2] or 1)
    return cores if len(cores) == count else [None] * count
