"""Slurm: a batch script that runs a Trainer script, or a script that uses accelerate."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.emit.exporters.base import Exporter, as_text, export_lines, launch_line, making_accelerate, warning_comments
from ladder.emit.files import OutputPaths
from ladder.emit.nodes import accelerate_options, finding, number_of_node
from ladder.emit.settings import Settings
from ladder.units import GIB, format_bytes

_LOADERS_OF_A_RANK = 4 * GIB
"""Host memory per rank for data loaders, which trials do not have. Chosen."""
_USAGE = """\
# Usage:
#   sbatch job.sh train.py [its arguments]             for a script that uses accelerate
#   sbatch job.sh --trainer train.py [its arguments]   for a script with the Hugging Face Trainer, whose arguments
#                                                      for this configuration are added
# Lines that begin with ##SBATCH are for you: fill in what your cluster needs, and remove one #."""


class Sbatch(Exporter):
    name = "sbatch"

    def text(self, settings: Settings, document: Mapping[str, Any], config: Path) -> str:
        cores = int(settings.environment["OMP_NUM_THREADS"]) * settings.ranks_of_a_node
        lines = [
            "#!/usr/bin/env bash",
            *warning_comments(settings),
            *_USAGE.splitlines(),
            f"#SBATCH --job-name={_job_name(settings.shape)}",
            "#SBATCH --output=%x-%j.out",
            "##SBATCH --time=24:00:00",
            "##SBATCH --account=YOUR-ACCOUNT",
            "##SBATCH --partition=YOUR-PARTITION",
            f"#SBATCH --nodes={settings.num_nodes}",
            "#SBATCH --ntasks-per-node=1",  # a launcher starts the ranks
            *([f"#SBATCH --gpus-per-node={settings.ranks_of_a_node}"] if settings.device == "cuda" else []),
            f"#SBATCH --cpus-per-task={cores}",
            *_host_memory(settings),
            "set -euo pipefail",
            *finding(settings.num_nodes),
            *_launch(settings, config),
            *export_lines(settings),
            # Since Slurm 22.05, srun does not inherit the number of cores from the job.
            f'srun --cpus-per-task={cores} "${{launch[@]}}"',
        ]
        return as_text(lines)


def _launch(settings: Settings, config: Path) -> list[str]:
    """The lines that set the array `launch` for srun. Paths are absolute, because Slurm runs a copy of the script."""
    accelerate = OutputPaths.beside(config).accelerate
    told = settings.backend.launch_options(settings, str(config))
    with_accelerate = [f"--config_file {shlex.quote(str(accelerate))}", told]
    start = "accelerate launch"
    if settings.num_nodes > 1:  # each copy has to know the number of its node
        start = f"bash -c 'exec accelerate launch --machine_rank {number_of_node()} \"$@\"' bash"
        with_accelerate.insert(0, accelerate_options(settings.num_nodes).strip())
    return [
        "form=accelerate",
        'if [ "${1-}" = --trainer ]; then form=trainer; shift; fi',
        "if [ $# -eq 0 ]; then",
        '  echo "usage: sbatch $0 [--trainer] train.py [its arguments]" >&2',
        "  exit 2",
        "fi",
        *_required(config, "it was moved or removed, so export this script again from its new place"),
        'if [ "$form" = trainer ]; then',
        f"  launch=({launch_line(settings, config)})",
        "else",
        *(f"  {line}" for line in _required(accelerate, f"make it with: {making_accelerate(config)}")),
        f'  launch=({start} {" ".join(with_accelerate)} "$@")',
        "fi",
    ]


def _required(path: Path, otherwise: str) -> list[str]:
    """Lines that end the script if `path` cannot be read; `otherwise` says what to do."""
    sentence = shlex.quote(f"{path} cannot be read; {otherwise}.")
    return [f"if [ ! -r {shlex.quote(str(path))} ]; then", f"  echo {sentence} >&2", "  exit 2", "fi"]


def _job_name(shape: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", shape.rstrip("/").rsplit("/", 1)[-1]).strip("-") or "training"


def _host_memory(settings: Settings) -> list[str]:
    """The lines that request host memory. With the partition's default, the cgroup would kill a job that offloads."""
    held = settings.host_memory // settings.num_nodes
    asked = held + held // 10 + _LOADERS_OF_A_RANK * settings.ranks_of_a_node
    return [
        f"# Host memory: the ranks used {format_bytes(held)} when this was measured; this requests a tenth more, and",
        f"# {format_bytes(_LOADERS_OF_A_RANK)} per rank. Data loaders, and loading the weights, may need more:",
        "# --mem on the command line of sbatch overrides this.",
        f"#SBATCH --mem={-(-asked // GIB)}G",
    ]
