"""What the ranks tell accelerate, for trials; the emitted files say the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ladder.backends.plain.rungs import PLAIN_RUNGS
from ladder.candidates import Engine, Rung, Technique
from ladder.workload.workload import Workload

FSDP = "fsdp"
"""The key of the settings of FSDP2; absent with DDP."""


def plain_config(workload: Workload, engine: Engine, *, micro_batch: int, accumulation: int) -> dict[str, Any]:
    """The settings of `engine`: batch, clipping, and the arguments of accelerate's FullyShardedDataParallelPlugin."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": workload.gradient_clipping,
    }
    if engine.rung.stage == 0:
        return config
    return config | {FSDP: _fsdp_settings(workload, engine)}


def rung_in(config: Mapping[str, Any]) -> Rung:
    """The rung of which `plain_config` made `config`."""
    settings = (0, "none")
    if (fsdp := config.get(FSDP)) is not None:
        settings = (3 if fsdp["reshard_after_forward"] else 2, "cpu" if fsdp["cpu_offload"] else "none")
    return next(rung for rung in PLAIN_RUNGS if (rung.stage, rung.offload_param) == settings)


def fsdp_environment(rung: Rung) -> dict[str, str]:
    """What accelerate's own launcher says too, for a start without it: accelerate then has gloo beside NCCL for tensors
    on the host. The Trainer's arguments come too late for that.
    """
    if rung.stage == 0:
        return {}
    return {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_OFFLOAD_PARAMS": str(rung.offload_param == "cpu").lower(),
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }


def one_rank_loads(load_in: str | None, techniques: Iterable[Technique]) -> bool:
    """Whether accelerate sends the weights of rank 0 to the others: neither packed ones nor changed ones."""
    return load_in is None and not any(technique.loads_on_all_ranks for technique in techniques)


def _fsdp_settings(workload: Workload, engine: Engine) -> dict[str, Any]:
    """Arguments of the plugin. Each layer is a unit; all other parameters stay gathered from forward to backward."""
    rung = engine.rung
    return {
        "fsdp_version": 2,
        "reshard_after_forward": rung.stage == 3,
        "cpu_offload": rung.offload_param == "cpu",
        "auto_wrap_policy": "transformer_based_wrap",
        "state_dict_type": "FULL_STATE_DICT",
        "cpu_ram_efficient_loading": one_rank_loads(workload.load_in, engine.techniques),
    }
