"""One rank of a training as one writes it by hand, with torch alone, DeepSpeed or the Trainer, and without ladder.

    [torchrun --nproc_per_node 2] benchmarks/by_hand.py SPEC.json

`side_by_side.py` writes SPEC.json and starts this. Micro-batches are tried in ascending order until one runs out of
memory (exit code 3), or is clearly slower than the fastest, or two in a row are slower at all. Rank 0 appends a JSON
line for each to the file that SPEC.json names: tokens/s over all ranks, and GiB at the peak of its GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from agreed import MOST, OUT_OF_MEMORY, SLOWER
from one_rank import (
    CLIP,
    Clock,
    adam,
    append,
    begin,
    deepspeed_for,
    forget_peaks,
    is_out_of_memory,
    join,
    make_model,
    read_spec,
    world_size,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer  # now: it takes a GiB of a CPU's memory, which is limited later

Batch = dict[str, torch.Tensor]
Step = Callable[[list[Batch]], None]
"""Makes one optimizer step of as many micro-batches as it accumulates."""
Steps = Callable[[int, int, Clock], None]
"""Makes optimizer steps of a micro-batch and an accumulation until the clock says that it is enough."""


def main() -> None:
    spec = read_spec(sys.argv[1])
    device = begin(spec)
    if spec["method"] != "trainer" or world_size() > 1:  # alone, the Trainer would wrap the model in DDP nevertheless
        join(device)
    speeds: list[float] = []
    try:
        steps = prepared(spec, make_model(spec, device), device)
        for micro_batch in spec["micro_batches"]:
            speeds.append(measure(spec, steps, micro_batch, device))
            if has_turned(speeds):
                break
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        os._exit(OUT_OF_MEMORY)  # the other ranks wait in a collective; torchrun ends them


def has_turned(speeds: list[float]) -> bool:
    """Whether larger micro-batches promise nothing: the last was clearly slower than the fastest, or the last two."""
    return speeds[-1] < SLOWER * max(speeds) or (len(speeds) > 2 and max(speeds[-2:]) < max(speeds[:-2]))


def measure(spec: dict[str, Any], steps: Steps, micro_batch: int, device: torch.device) -> float:
    """Tokens/s of `micro_batch`, and a line in the file for it."""
    forget_peaks(device)
    clock, accumulation = Clock(spec, device), spec["batch"] // (micro_batch * world_size())
    steps(micro_batch, accumulation, clock)
    row = clock.row(micro_batch, accumulation)
    append(spec, row)
    return float(row["tokens_per_second"])


def prepared(spec: dict[str, Any], model: Any, device: torch.device) -> Steps:
    """What makes optimizer steps of a micro-batch and an accumulation until the clock says that it is enough."""
    method = spec["method"]
    if method == "trainer":
        return trainer_steps(spec, model)
    if method.startswith("zero"):
        step = deepspeed_step(model, of_the_tutorials(int(method.removeprefix("zero"))), spec, device)
    elif method == "deepspeed":
        step = deepspeed_step(model, spec["deepspeed"], spec, device)
    elif method == "ddp":
        step = ddp_step(model, device)
    else:
        step = fsdp2_step(model, reshard=method == "fsdp2")

    def steps(micro_batch: int, accumulation: int, clock: Clock) -> None:
        ids = torch.randint(4, model.config.vocab_size, (micro_batch, spec["seq_len"]), device=device)
        batches = [{"input_ids": ids, "labels": ids}] * accumulation
        step(batches)
        while not clock.done():
            step(batches)

    return steps


def ddp_step(model: Any, device: torch.device, *, autocast: bool = True) -> Step:
    wrapped = model
    if world_size() > 1:
        ids = [device.index] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    optimizer = adam(model)

    def step(batches: list[Batch]) -> None:
        for number, batch in enumerate(batches, start=1):
            waits = wrapped is not model and number < len(batches)
            with wrapped.no_sync() if waits else nullcontext():
                with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                    loss = wrapped(**batch).loss / len(batches)
                loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2_step(model: Any, *, reshard: bool) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in _layers(model):
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = adam(model)

    def step(batches: list[Batch]) -> None:
        for number, batch in enumerate(batches, start=1):
            model.set_requires_gradient_sync(number == len(batches))
            (model(**batch).loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks of a transformer: the members of its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))
    return list(layers)


def of_the_tutorials(stage: int) -> dict[str, Any]:
    """The configuration that DeepSpeed's tutorials give for this stage."""
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    return {"gradient_clipping": CLIP, "bf16": {"enabled": True}, "zero_optimization": zero}


def deepspeed_step(model: Any, config: dict[str, Any], spec: dict[str, Any], device: torch.device) -> Step:
    """Under a DeepSpeed configuration."""
    sizes = {"train_micro_batch_size_per_gpu": spec["micro_batches"][0], "train_batch_size": spec["batch"]}
    whole = {key: value for key, value in config.items() if key != "gradient_accumulation_steps"} | sizes
    engine, *_ = deepspeed_for(device).initialize(model=model, optimizer=adam(model), config=whole)

    def step(batches: list[Batch]) -> None:
        engine.set_train_micro_batch_size(len(batches[0]["input_ids"]))
        engine.set_train_batch_size(spec["batch"])
        for batch in batches:
            engine.backward(engine(**batch).loss)
            engine.step()

    return step


class Timed(transformers.TrainerCallback):
    """Ends a training when the clock says so."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = self._clock.done()


def trainer_steps(spec: dict[str, Any], model: Any) -> Steps:
    """The Trainer without DeepSpeed, with its own loop, optimizer and data loader."""

    def steps(micro_batch: int, accumulation: int, clock: Clock) -> None:
        trainer_of(spec, model, micro_batch, accumulation, Timed(clock)).train()

    return steps


def trainer_of(
    spec: dict[str, Any], model: Any, micro_batch: int, accumulation: int, callback: Any, **more: Any
) -> Trainer:
    """A Trainer that makes as many steps as a clock needs at most; `more` are further arguments."""
    most = spec.get("steps", MOST) + 2
    arguments = transformers.TrainingArguments(
        output_dir=spec["folder"],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        max_steps=most,
        bf16=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-5,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        **more,
    )
    one = torch.randint(4, model.config.vocab_size, (spec["seq_len"],))
    data = [{"input_ids": one, "labels": one}] * (2 * spec["batch"] * most)
    return Trainer(model, arguments, train_dataset=data, callbacks=[callback])


if __name__ == "__main__":
    main()
