"""The YAML for `accelerate launch`: how many processes, and where the DeepSpeed configuration is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ladder.emit.answer import Answer
from ladder.emit.settings import Settings, settings_of


def accelerate_config(answer: Answer | Settings, config_path: Path) -> dict[str, Any]:
    """accelerate's own configuration, referring to `config_path` for everything DeepSpeed.

    accelerate refuses a file that also names mixed precision, accumulation, clipping, stage or offload devices.
    """
    settings = settings_of(answer)
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": os.path.abspath(config_path),
            # Models are built in shards under stage 3; whole on every rank they may not fit.
            "zero3_init_flag": settings.stage == 3,
        },
        "num_machines": 1,
        "num_processes": settings.world_size,
        "machine_rank": 0,
        # Any free port, so that two trainings on one machine do not meet.
        "main_process_port": 0,
        "main_training_function": "main",
        "use_cpu": settings.device == "cpu",
    }


def to_yaml(config: dict[str, Any]) -> str:
    """`config` as YAML in its own key order."""
    import yaml  # here: a help that lists the exporters does without it

    text: str = yaml.safe_dump(config, sort_keys=False, width=1_000)
    return text
