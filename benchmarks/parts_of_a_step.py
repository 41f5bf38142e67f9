"""Why one way to train a model is faster than another: the same step in several ways, turn by turn.

    python benchmarks/parts_of_a_step.py [MODEL] [--task masked-lm] [--seq-len 512] [--batch 64]
        [--turns 5] [--steps 20] [--only WAY …] [--engines ENGINE …]

On several GPUs, `torchrun --nproc-per-node GPUS` takes the place of `python`. All make a step of the whole batch,
divided among the GPUs, on random tokens, with gradient clipping and AdamW. The ways (WAYS) differ in what computes in
16 bits and in what stands around the model: nothing, accelerate's conversion of the outputs to 32 bits, or a stage of
DeepSpeed, which by default looks for infinite gradients in every weight's, with DeepSpeed's own settings or those of an
engine of ladder's (--engines; OF_LADDER). In each turn, steps are given to the GPU ahead of time, as in training, and
then `apart`: none before the GPU has ended the one before, as in ladder's trials. Rank 0 prints JSON: milliseconds of a
step in each turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.operations import convert_outputs_to_fp32
from by_hand import ddp_step, deepspeed_step
from one_rank import CLIP, begin, join, make_model, now, world_size
from side_by_side import Work

from ladder.backends.deepspeed.config import deepspeed_config
from ladder.launch.counting import counting
from ladder.techniques.keys import engine_in
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

Step = Callable[[], None]
_UNTIMED = 4
"""Steps of each way before the first turn. Chosen: the first makes Adam's states."""
_OF_DEEPSPEED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "16 bits": ({"bf16": {"enabled": True}}, (0, 1, 2)),
    "16 bits, unchecked": ({"bf16": {"enabled": True, "check_grad_overflow": False}}, (1, 2)),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, (0, 1, 2)),
}
"""What computes in 16 bits, as a part of DeepSpeed's configuration, and the stages."""
WAYS: dict[str, dict[str, Any]] = {"autocast": {}, "autocast, outputs converted": {}, "16 bits": {}} | {
    f"DeepSpeed stage {stage}, {name}": {"gradient_clipping": CLIP, "zero_optimization": {"stage": stage}, **part}
    for name, (part, stages) in _OF_DEEPSPEED.items()
    for stage in stages
}
"""By what is printed: DeepSpeed's configuration, empty without DeepSpeed."""
OF_LADDER = tuple(
    f"{rung}[overlap_comm={overlap}]"
    for rung in ("zero1", "zero2", "zero1+unchecked-gradients", "zero2+unchecked-gradients")
    for overlap in (True, False)
)
"""Engines whose configuration is as ladder writes it."""


def of_ladder(name: str, work: Work, micro_batch: int) -> dict[str, Any]:
    """DeepSpeed's configuration of the engine with this name, for `micro_batch` sequences on each GPU."""
    workload = Workload(
        model=resolve_model(work.model, count=counting()),
        task=work.task,
        seq_len=work.seq_len,
        global_batch_size=work.batch,
    )
    engine = engine_in(f"{name} ckpt=off mb={micro_batch}")
    sizes = {"micro_batch": micro_batch, "accumulation": 1, "world_size": world_size()}
    return deepspeed_config(workload, engine, nvme_path=None, **sizes)


def prepared(name: str, work: Work, device: torch.device) -> Step:
    """What makes a step in this way, with a model of its own."""
    own = work.batch // world_size()
    config = WAYS[name] if name in WAYS else of_ladder(name, work, own)
    is_narrow = "16 bits" in name or name not in WAYS
    spec = work.spec("deepspeed" if is_narrow else "ddp", Path("unused"), micro_batches=[own])
    model = make_model(spec, device)
    ids = torch.randint(4, model.config.vocab_size, (own, work.seq_len), device=device)
    batch = {"input_ids": ids, "labels": ids}
    if "converted" in name:
        model.forward = convert_outputs_to_fp32(model.forward)
    if config:
        whole = deepspeed_step(model, config, spec, device)
    else:
        whole = ddp_step(model, device, autocast="autocast" in name)
    return partial(whole, [batch])


def seconds(step: Step, steps: int, device: torch.device, *, apart: bool = False) -> float:
    """Of a step; `apart` if each is to end before the next one begins."""
    began = now(device)
    for _ in range(steps):
        step()
        if apart:
            now(device)
    return (now(device) - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="roberta-base")
    parser.add_argument("--task", default="masked-lm")
    for name, number in (("--seq-len", 512), ("--batch", 64), ("--turns", 5), ("--steps", 20)):
        parser.add_argument(name, type=int, default=number)
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--engines", nargs="*", default=list(OF_LADDER), metavar="ENGINE")
    options = parser.parse_args()
    work = Work(model=options.model, seq_len=options.seq_len, batch=options.batch, task=options.task)
    device = begin(work.spec("ddp", Path("unused")))
    join(device)
    steps = {name: prepared(name, work, device) for name in (*options.only, *options.engines)}
    milliseconds: dict[str, dict[str, list[float]]] = {name: {"ahead": [], "apart": []} for name in steps}
    for step in steps.values():
        seconds(step, _UNTIMED, device)
    for _ in range(options.turns):
        for name, step in steps.items():
            seconds(step, 1, device)
            for kind, taken in milliseconds[name].items():
                taken.append(round(1000 * seconds(step, options.steps, device, apart=kind == "apart"), 2))
    if dist.get_rank() > 0:
        return
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    told = {"date": time.strftime("%Y-%m-%d"), "gpu": gpu, "gpus": world_size(), "model": work.model}
    sizes = {"seq_len": work.seq_len, "batch": work.batch, "steps_of_a_turn": options.steps}
    print(json.dumps({**told, **sizes, "milliseconds": milliseconds}))


if __name__ == "__main__":
    main()
