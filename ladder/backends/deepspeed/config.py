"""The DeepSpeed configuration of an engine, and the knobs in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.backends.deepspeed.rungs import RUNGS
from ladder.candidates import Engine, Place, Rung, Technique
from ladder.optimizers.registry import OPTIMIZERS
from ladder.workload.workload import Dtype, Workload

PIN_MEMORY = "pin_memory"
"""The only knob in the offload sections; all others are in `zero_optimization` itself."""

_NO_KNOBS = {"stage", "zero_hpz_partition_size"}
"""What `zero_optimization` says beside knobs: the rung, and a technique."""


def default_knobs(workload: Workload, rung: Rung, world_size: int) -> dict[str, bool | int]:
    """Our defaults for DeepSpeed's `zero_optimization` settings for `rung`, in elements.

    Buckets grow with what is trained, so that a small model has small buffers. Parameters of up to 10·hidden stay on
    every rank, as with "auto" in the HF Trainer. The Trainer's 0.9·hidden² for prefetching is less than a layer, so
    DeepSpeed's default is used if that is more. Sub-groups have a fifth of DeepSpeed's default size, because their
    temporary fp32 gradients set the peak of stage 3 with small micro-batches.
    """
    model = workload.model
    if rung.stage == 0:
        return {}
    bucket = _bucket(workload.weights.trained)
    knobs: dict[str, bool | int] = {
        # One rank has nothing to overlap, and DeepSpeed waits for the GPU after each bucket (measured: 5 % of a step of
        # RoBERTa-base, benchmarks/results/compare). At stage 3 and with offload, this was not measured.
        "overlap_comm": world_size > 1 or rung.stage == 3 or rung.offload_optimizer != "none",
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
    }
    if rung.stage < 3:
        knobs["allgather_bucket_size"] = bucket
        # Useful if gradients are copied to the host, because each rank then copies its own share.
        knobs["round_robin_gradients"] = rung.offload_optimizer == "cpu"
        return knobs
    return knobs | {
        "stage3_prefetch_bucket_size": max(
            int(0.9 * model.hidden_size**2), min(50_000_000, _bucket(model.num_parameters))
        ),
        "stage3_param_persistence_threshold": 10 * model.hidden_size,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "sub_group_size": 200_000_000,
        "stage3_gather_16bit_weights_on_model_save": True,
    }


def _bucket(num_parameters: int) -> int:
    bucket = max(1_000_000, min(200_000_000, num_parameters // 8))
    return bucket - bucket % 2  # DeepSpeed asserts that buckets are aligned to four bytes


def engine_knobs(workload: Workload, engine: Engine, world_size: int) -> dict[str, bool | int]:
    """`default_knobs`, limited by the rung's bounds and overridden by the engine's knobs, without `PIN_MEMORY`."""
    knobs = default_knobs(workload, engine.rung, world_size)
    for name, bound in engine.rung.knobs:
        knobs[name] = min(knobs[name], bound)
    return knobs | {name: value for name, value in engine.knobs if name != PIN_MEMORY}


def engine_in(
    zero: Mapping[str, Any], workload: Workload, world_size: int, techniques: tuple[Technique, ...]
) -> Engine:
    """The engine of which `deepspeed_config` made this section `zero`, with knobs that differ from our defaults."""
    sections = (zero.get(name, {}) for name in ("offload_optimizer", "offload_param"))
    where = (zero["stage"], *(section.get("device", "none") for section in sections))
    knobs = {name: value for name, value in zero.items() if name not in _NO_KNOBS and not isinstance(value, dict)}
    alike = [rung for rung in RUNGS if (rung.stage, rung.offload_optimizer, rung.offload_param) == where]
    for rung in alike:
        if engine_knobs(workload, Engine(rung), world_size) == knobs:
            return Engine(rung, (), techniques)
    usual = engine_knobs(workload, Engine(alike[0]), world_size)
    turned = tuple(sorted(pair for pair in knobs.items() if usual.get(pair[0]) != pair[1]))
    return Engine(alike[0], turned, techniques)


def deepspeed_config(
    workload: Workload, engine: Engine, *, micro_batch: int, accumulation: int, world_size: int, nvme_path: Path | None
) -> dict[str, Any]:
    """The DeepSpeed configuration of `engine` for this workload.

    It has no optimizer and no scheduler, so the Trainer and accelerate use the user's. All values are explicit, so that
    they mean the same to DeepSpeed, the Trainer and accelerate. ValueError for an NVMe rung without `nvme_path`.
    """
    rung = engine.rung
    config: dict[str, Any] = {
        "train_batch_size": micro_batch * accumulation * world_size,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": workload.gradient_clipping,
        "zero_optimization": {"stage": rung.stage, **engine_knobs(workload, engine, world_size)},
    }
    config |= _precision(workload.dtype)
    zero = config["zero_optimization"]
    for section, device in (("offload_optimizer", rung.offload_optimizer), ("offload_param", rung.offload_param)):
        if device != "none":
            zero[section] = _offload_section(section, device, workload, world_size, nvme_path)
            zero[section][PIN_MEMORY] = bool(dict(engine.knobs).get(PIN_MEMORY, True))
    if "nvme" in rung.devices:
        config["aio"] = {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True}
    config |= OPTIMIZERS[workload.optimizer].deepspeed_settings()
    for technique in engine.techniques:
        technique.configure(config)
    return config


def _precision(dtype: Dtype) -> dict[str, Any]:
    """DeepSpeed trains in fp32 if nothing is said."""
    if dtype == "fp16":
        return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}
    return {"bf16": {"enabled": True}} if dtype == "bf16" else {}


def _offload_section(
    section: str, device: Place, workload: Workload, world_size: int, nvme_path: Path | None
) -> dict[str, Any]:
    settings: dict[str, Any] = {"device": device, PIN_MEMORY: True}
    if device != "nvme":
        return settings
    if nvme_path is None:
        raise ValueError("an NVMe rung needs an nvme_path")
    settings["nvme_path"] = str(nvme_path)
    if section == "offload_param":
        # A rank's partition of the largest parameter must fit into one buffer, or DeepSpeed fails with an assertion.
        settings |= {
            "max_in_cpu": 0,
            "buffer_count": 5,
            "buffer_size": -(-workload.model.largest_parameter // world_size) + 4096,
        }
    else:
        settings["buffer_count"] = 4
    return settings
