"""The YAML for `accelerate launch`: the number of processes, and DeepSpeed's configuration or FSDP2's settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ladder.emit.answer import Answer
from ladder.emit.nodes import PORT
from ladder.emit.settings import Settings, settings_of
from ladder.emit.sharding import sharding


def accelerate_config(answer: Answer | Settings, config_path: Path) -> dict[str, Any]:
    """accelerate's configuration, which refers to `config_path` for all DeepSpeed settings if it uses DeepSpeed."""
    settings = settings_of(answer)
    return {
        "compute_environment": "LOCAL_MACHINE",
        **(_deepspeed(settings, config_path) if settings.trains_with_deepspeed else _without(settings)),
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


def _deepspeed(settings: Settings, config_path: Path) -> dict[str, Any]:
    """accelerate refuses a file that also sets mixed precision, accumulation, clipping, stage or offload devices."""
    return {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": os.path.abspath(config_path),
            # Stage 3 builds the model in shards, because the whole model may not fit on a rank.
            "zero3_init_flag": settings.stage == 3,
            # Without this, accelerate has DeepSpeed start the other nodes by pdsh.
            **({"deepspeed_multinode_launcher": "standard"} if settings.num_nodes > 1 else {}),
        },
    }


def _without(settings: Settings) -> dict[str, Any]:
    """Training without DeepSpeed: the precision, and FSDP2's settings."""
    said: dict[str, Any] = {"mixed_precision": settings.dtype}
    if settings.stage:
        words = {f"fsdp_{name}": value for name, value in sharding(settings, "offload_params").items()}
        return {"distributed_type": "FSDP", "fsdp_config": words, **said}
    of_several = "MULTI_CPU" if settings.device == "cpu" else "MULTI_GPU"
    return {"distributed_type": of_several if settings.world_size > 1 else "NO", **said}


def to_yaml(config: dict[str, Any]) -> str:
    """`config` as YAML in its own key order."""
    import yaml  # imported here because the help, which lists the exporters, does not need it

    text: str = yaml.safe_dump(config, sort_keys=False, width=1_000)
    return text
