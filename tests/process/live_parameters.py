"""Prints how many elements DeepSpeed's stage 3 has gathered at most in a micro-step of a small Llama, on one CPU rank.

python live_parameters.py CONFIG CASES    (JSON: the model's, and a list of settings with 0 or 1 for checkpointing)
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator


def main() -> None:
    config, cases = (json.loads(argument) for argument in sys.argv[1:])
    deepspeed.init_distributed(dist_backend="gloo")
    print("live", json.dumps([most_gathered(config, *case) for case in cases]), flush=True)


def most_gathered(config: dict[str, Any], zero: dict[str, Any], checkpointing: int) -> int:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, **zero},
    }
    # Imported before Init patches torch.
    kind, shape = transformers.LlamaForCausalLM, transformers.LlamaConfig(**config)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = kind(shape).bfloat16()
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parameters = list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(parameters), config=settings)
    fetch, most = PartitionedParameterCoordinator.fetch_sub_module, 0

    def watched(self: Any, *arguments: Any, **named: Any) -> None:
        nonlocal most
        fetch(self, *arguments, **named)
        here = [each for each in parameters if each.ds_status != ZeroParamStatus.NOT_AVAILABLE and not each.ds_persist]
        most = max(most, sum(each.ds_numel for each in here))

    PartitionedParameterCoordinator.fetch_sub_module = watched
    tokens = torch.randint(0, config["vocab_size"], (1, 64))
    for _ in range(3):  # the order of modules is known from the third micro-step on
        most = 0
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    PartitionedParameterCoordinator.fetch_sub_module = fetch
    engine.destroy()
    return most


if __name__ == "__main__":
    main()
