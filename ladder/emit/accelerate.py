"""The YAML for `accelerate launch`: the number of processes, and what chooses the backend."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ladder.emit.answer import Answer
from ladder.emit.nodes import PORT
from ladder.emit.settings import Settings, settings_of


def accelerate_config(answer: Answer | Settings, config_path: Path) -> dict[str, Any]:
    """accelerate's configuration, which may refer to the backend's configuration at `config_path`."""
    settings = settings_of(answer)
    return {
        "compute_environment": "LOCAL_MACHINE",
        **settings.backend.accelerate_config(settings, os.path.abspath(config_path)),
        "num_machines": settings.num_nodes,
        "num_processes": settings.world_size,
        "machine_rank": 0,
        # Any free port, so that two trainings on one machine do not collide.
        "main_process_port": 0 if settings.num_nodes == 1 else PORT,
        "main_training_function": "main",
        "use_cpu": settings.device == "cpu",
        **{
            name: value
            for technique in settings.techniques
            for name, value in technique.accelerate_config(settings.world_size).items()
        },
    }


def to_yaml(config: dict[str, Any]) -> str:
    """`config` as YAML in its own key order."""
    import yaml  # imported here because the help, which lists the exporters, does not need it

    text: str = yaml.safe_dump(config, sort_keys=False, width=1_000)
    return text
