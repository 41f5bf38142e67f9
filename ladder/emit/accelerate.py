"""The YAML for `accelerate launch`: the number of processes and the path of the DeepSpeed configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ladder.emit.answer import Answer
from ladder.emit.settings import Settings, settings_of


def accelerate_config(answer: Answer | Settings, config_path: Path) -> dict[str, Any]:
    """accelerate's configuration, which refers to `config_path` for all DeepSpeed settings.

    accelerate refuses a file that also sets mixed precision, accumulation, clipping, stage or offload devices.
    """
    settings = settings_of(answer)
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": os.path.abspath(config_path),
            # Stage 3 builds the model in shards, because the whole model may not fit on a rank.
            "zero3_init_flag": settings.stage == 3,
        },
        "num_machines": 1,
        "num_processes": settings.world_size,
        "machine_rank": 0,
        # Any free port, so that two trainings on one machine do not collide.
        "main_process_port": 0,
        "main_training_function": "main",
        "use_cpu": settings.device == "cpu",
    }


def to_yaml(config: dict[str, Any]) -> str:
    """`config` as YAML in its own key order."""
    import yaml  # imported here because the help, which lists the exporters, does not need it

    text: str = yaml.safe_dump(config, sort_keys=False, width=1_000)
    return text
