"""Slurm: a batch script that starts a Trainer script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.emit.exporters.base import (
    Exporter,
    as_text,
    export_lines,
    launch_line,
    warning_comments,
)
from ladder.emit.settings import Settings
from ladder.units import GIB, format_bytes

_LOADERS_OF_A_RANK = 4 * GIB
"""For a rank's data loaders, which the trials had none of."""


class Sbatch(Exporter):
    name = "sbatch"

    def text(self, settings: Settings, document: Mapping[str, Any], config: Path) -> str:
        cores = int(settings.environment["OMP_NUM_THREADS"]) * settings.world_size
        lines = [
            "#!/usr/bin/env bash",
            *warning_comments(settings),
            "#SBATCH --nodes=1",
            "#SBATCH --ntasks-per-node=1",  # torchrun starts the ranks
            *([f"#SBATCH --gpus-per-node={settings.world_size}"] if settings.device == "cuda" else []),
            f"#SBATCH --cpus-per-task={cores}",
            *_host_memory(settings),
            "set -euo pipefail",
            *export_lines(settings),
            # Since Slurm 22.05 srun takes the number of cores from nowhere else.
            f"srun --cpus-per-task={cores} {launch_line(settings, config)}",
        ]
        return as_text(lines)


def _host_memory(settings: Settings) -> list[str]:
    """What the job asks for: it otherwise gets its partition's default, and its cgroup kills an offload.

    Nothing where the file does not say what was held: a guess could be less than that default.
    """
    held = settings.host_memory
    if held is None:
        return []
    asked = held + held // 10 + _LOADERS_OF_A_RANK * settings.world_size
    return [
        f"# Host memory: the ranks held {format_bytes(held)} when this was measured; asked for are a tenth more and",
        f"# {format_bytes(_LOADERS_OF_A_RANK)} a rank. Data loaders, and weights as they are loaded, may need more:",
        "# a --mem on the command line of sbatch wins over this one.",
        f"#SBATCH --mem={-(-asked // GIB)}G",
    ]
