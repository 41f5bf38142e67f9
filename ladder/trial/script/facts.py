"""What a look reports of a script's model and of its schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from ladder.trial.script.hold import NotTakenHoldOfError
from ladder.trial.script.samples import Samples, shape_of
from ladder.workload.lora import Lora
from ladder.workload.script import OwnEngine

_SHORT = (torch.bfloat16, torch.float16)


def model_facts(model: Any) -> dict[str, Any]:
    """What a look reports of the script's model, as arguments of ScriptFacts."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    total, trainable = count_parameters(model)
    adapters = [config for config in getattr(model, "peft_config", {}).values() if hasattr(config, "lora_alpha")]
    held = [load_in for load_in in ("4bit", "8bit") if getattr(model, f"is_loaded_in_{load_in}", False)]
    return {
        "model_config_json": config_of(model),
        "model_class": class_in_words(model),
        "num_parameters": total,
        "num_trainable": trainable,
        "lora": Lora.from_peft(vars(adapters[0])).for_peft() if adapters else None,
        "load_in": held[0] if held else None,
        "prepare_kbit": bool(held) and _has_wide_rest(model),
        "weights": _most_of(each for each in model.parameters() if each.requires_grad),
        "held": _most_of(each for each in model.parameters() if each.is_floating_point()),
        "can_checkpoint": hasattr(model, "gradient_checkpointing_enable"),
        "trains_16_bits": any(each.requires_grad and each.dtype in _SHORT for each in model.parameters()),
    }


def sample_facts(samples: Samples) -> dict[str, Any]:
    """The same of the samples that it trains on."""
    rows, longest = shape_of(samples.longest(1))
    return {
        "longest": longest,
        "rows": rows,
        "mean_tokens": samples.mean_tokens(),
        "num_samples": samples.total,
        "num_looked_at": len(samples.sizes),
        "sizes": samples.read_singly,
    }


def engine_facts(model: Any, deepspeed: Mapping[str, Any] | None, **arguments: Any) -> OwnEngine:
    """What the script trains on by itself, with its own DeepSpeed configuration or with none.

    `arguments` are the Trainer's that change its kernels, as far as they are on.
    """
    on = {name: value for name, value in arguments.items() if value}
    checkpointing = bool(getattr(model, "is_gradient_checkpointing", False))
    if deepspeed is None:
        return OwnEngine(checkpointing=checkpointing, arguments=on)
    zero = deepspeed.get("zero_optimization") or {}
    stage = int(zero.get("stage") or 0)
    optimizer, parameters = (
        str((zero.get(name) or {}).get("device") or "none") for name in ("offload_optimizer", "offload_param")
    )
    return OwnEngine(stage, optimizer, parameters, checkpointing, on)


def fsdp_facts(model: Any, words: Mapping[str, Any], **arguments: Any) -> OwnEngine | None:
    """The same with FSDP2, as accelerate's plugin has it; None with FSDP 1, which no rung is like."""
    if words.get("fsdp_version") != 2:
        return None
    offloaded = words.get("cpu_offload")  # a plugin has a policy in its place, of which one is to leave all where it is
    place = "cpu" if offloaded is True or isinstance(offloaded, CPUOffloadPolicy) else "none"
    own = replace(engine_facts(model, None, **arguments), offload_optimizer=place, offload_param=place, fsdp2=True)
    checkpointing = own.checkpointing or bool(words.get("activation_checkpointing"))
    return replace(own, stage=2 if words.get("reshard_after_forward") is False else 3, checkpointing=checkpointing)


def _has_wide_rest(model: Any) -> bool:
    """Whether most frozen weights that are not packed are in fp32, as after peft's prepare_model_for_kbit_training."""
    frozen = (each for each in model.parameters() if not each.requires_grad and each.is_floating_point())
    return _most_of(each for each in frozen if not hasattr(each, "quant_state")) == "float32"


def _most_of(parameters: Iterable[Any]) -> str:
    """The type of most elements of `parameters`; "" of none."""
    elements = Counter[str]()
    for each in parameters:
        elements[str(each.dtype).removeprefix("torch.")] += each.numel()
    return elements.most_common(1)[0][0] if elements else ""


def length_of_schedule(scheduler: Any) -> int | None:
    """Steps over which a schedule of torch or transformers changes the learning rate; None where it does not say."""
    told = [getattr(scheduler, name, None) for name in ("total_steps", "T_max", "total_iters", "total_num_steps")]
    of_transformers = getattr(scheduler, "lr_lambdas", ())  # partial functions
    told += [getattr(each, "keywords", {}).get("num_training_steps") for each in of_transformers]
    return next((int(each) for each in told if each), None)


def class_in_words(model: Any) -> str:
    """`LlamaForCausalLM`, of a model inside an adapter too."""
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__


def count_parameters(model: Any) -> tuple[int, int]:
    """All parameters and the trainable ones, in shards too."""
    sizes = [(getattr(each, "ds_numel", each.numel()), each.requires_grad) for each in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)


def config_of(model: Any) -> dict[str, Any]:
    """As the config.json of the model, or of one within it, would have it. NotTakenHoldOfError without one."""
    configs = (getattr(each, "config", None) for each in model.modules())
    config = next((each for each in configs if hasattr(each, "to_dict")), None)
    if config is None:
        raise NotTakenHoldOfError(
            f"its model, a {type(model).__name__}, has no configuration of transformers, from which its size is read"
        )
    found: dict[str, Any] = config.to_dict()
    return found
