"""The DeepSpeed configuration of an engine, and the knobs in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ladder.candidates import Device, Engine, Rung
from ladder.workload.workload import Workload

PIN_MEMORY = "pin_memory"
"""The knob that DeepSpeed reads in the offload sections; all others are settings of `zero_optimization` itself."""


def default_knobs(workload: Workload, rung: Rung) -> dict[str, bool | int]:
    """Our starting values of DeepSpeed's `zero_optimization` settings for `rung`, in elements.

    Buckets follow the model's size, so that a small model does not pay for buffers made for a large one. Parameters up
    to 10·hidden stay resident, as where the HF Trainer reads "auto"; its 0.9·hidden² to prefetch is less than a layer,
    so DeepSpeed's own default bounds it from below. The optimizer steps through sub-groups a fifth of the default size:
    its temporary fp32 gradients are the peak of stage 3 at small micro-batches.
    """
    model = workload.model
    if rung.stage == 0:
        return {}
    bucket = max(1_000_000, min(200_000_000, model.num_parameters // 8))
    bucket -= bucket % 2  # DeepSpeed aligns what it gathers to four bytes, and asserts that its buckets are
    knobs: dict[str, bool | int] = {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
    }
    if rung.stage < 3:
        knobs["allgather_bucket_size"] = bucket
        # It pays where gradients are copied to the host: each rank then copies its own share.
        knobs["round_robin_gradients"] = rung.offload_optimizer == "cpu"
        return knobs
    return knobs | {
        "stage3_prefetch_bucket_size": max(int(0.9 * model.hidden_size**2), min(50_000_000, bucket)),
        "stage3_param_persistence_threshold": 10 * model.hidden_size,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "sub_group_size": 200_000_000,
        "stage3_gather_16bit_weights_on_model_save": True,
    }


def engine_knobs(workload: Workload, engine: Engine) -> dict[str, bool | int]:
    """`default_knobs`, lowered by the rung's own bounds and overridden by the engine's knobs, `PIN_MEMORY` aside."""
    knobs = default_knobs(workload, engine.rung)
    for name, bound in engine.rung.knobs:
        knobs[name] = min(knobs[name], bound)
    return knobs | {name: value for name, value in engine.knobs if name != PIN_MEMORY}


def deepspeed_config(
    workload: Workload, engine: Engine, *, micro_batch: int, accumulation: int, world_size: int, nvme_path: Path | None
) -> dict[str, Any]:
    """The DeepSpeed configuration of `engine` for this workload.

    It names no optimizer and no scheduler: the Trainer and accelerate then take the user's own, whatever the learning
    rate. All values are explicit, so that it says the same to DeepSpeed, the Trainer and accelerate.
    `nvme_path` is needed by NVMe rungs only; ValueError without it.
    """
    rung = engine.rung
    config: dict[str, Any] = {
        "train_batch_size": micro_batch * accumulation * world_size,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": workload.gradient_clipping,
        "zero_optimization": {"stage": rung.stage, **engine_knobs(workload, engine)},
    }
    config |= (
        {"bf16": {"enabled": True}}
        if workload.dtype == "bf16"
        else {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}
    )
    zero = config["zero_optimization"]
    for section, device in (("offload_optimizer", rung.offload_optimizer), ("offload_param", rung.offload_param)):
        if device != "none":
            zero[section] = _offload_section(section, device, workload, world_size, nvme_path)
            zero[section][PIN_MEMORY] = bool(dict(engine.knobs).get(PIN_MEMORY, True))
    if "nvme" in rung.devices:
        config["aio"] = {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True}
    if workload.optimizer == "sgd":
        config["zero_allow_untested_optimizer"] = True  # it is not among those that DeepSpeed tried with ZeRO
        config["zero_force_ds_cpu_optimizer"] = False
    for technique in engine.techniques:
        technique.configure(config)
    return config


def _offload_section(
    section: str, device: Device, workload: Workload, world_size: int, nvme_path: Path | None
) -> dict[str, Any]:
    settings: dict[str, Any] = {"device": device, PIN_MEMORY: True}
    if device != "nvme":
        return settings
    if nvme_path is None:
        raise ValueError("an NVMe rung needs an nvme_path")
    settings["nvme_path"] = str(nvme_path)
    if section == "offload_param":
        # A rank's partition of the largest parameter must fit one buffer, or DeepSpeed asserts.
        settings |= {
            "max_in_cpu": 0,
            "buffer_count": 5,
            "buffer_size": -(-workload.model.largest_parameter // world_size) + 4096,
        }
    else:
        settings["buffer_count"] = 4
    return settings
