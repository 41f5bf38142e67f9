"""One rank of a training as one writes it by hand, with torch alone, DeepSpeed or the Trainer, and without ladder.

    [torchrun --nproc_per_node 2] benchmarks/by_hand.py SPEC.json

`against_plain.py` writes SPEC.json and starts this. Micro-batches are tried in ascending order until one runs out of
memory (exit code 3), or is clearly slower than the fastest, or two in a row are slower at all. Rank 0 appends a JSON
line for each to the file that SPEC.json names: tokens/s over all ranks, and GiB at the peak of its GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel

Batch = dict[str, torch.Tensor]
Step = Callable[[list[Batch]], None]
"""Makes one optimizer step of as many micro-batches as it accumulates."""
Steps = Callable[[int, int, "Clock"], None]
"""Makes optimizer steps of a micro-batch and an accumulation until the clock says that it is enough."""

OUT_OF_MEMORY = 3
"""The exit code."""
_SLOWER = 0.97
"""A micro-batch below this share of the fastest ends the search, as whoever tries by hand stops there. Chosen."""
_FEWEST, _MOST = 2, 20
"""Timed steps. Chosen: with the four seconds that are usual, as exact as 1 % on a quiet host."""
_CLIP = 1.0


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if spec["method"] != "trainer" or _world_size() > 1:  # alone, the Trainer would wrap the model in DDP nevertheless
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        os.environ.update({name: os.environ.get(name, value) for name, value in alone.items()})
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    speeds: list[float] = []
    try:
        steps = prepared(spec, make_model(spec, device), device)
        for micro_batch in spec["micro_batches"]:
            speeds.append(measure(spec, steps, micro_batch, device))
            if has_turned(speeds):
                break
    except torch.OutOfMemoryError:
        os._exit(OUT_OF_MEMORY)  # the other ranks wait in a collective; torchrun ends them


def has_turned(speeds: list[float]) -> bool:
    """Whether larger micro-batches promise nothing: the last was clearly slower than the fastest, or the last two."""
    return speeds[-1] < _SLOWER * max(speeds) or (len(speeds) > 2 and max(speeds[-2:]) < max(speeds[:-2]))


def make_model(spec: dict[str, Any], device: torch.device) -> Any:
    """The model with random weights, with its adapters, checkpointing and Liger's kernels."""
    raw = {key: value for key, value in spec["config"].items() if key not in ("torch_dtype", "dtype")}
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    torch.manual_seed(0)
    of_16_bits = spec["method"].startswith("zero") or spec["lora"]
    cls = transformers.AutoModelForCausalLM
    if spec["load_in"]:
        model = _in_4_bits(cls, config, device)
    else:
        with device:
            model = cls.from_config(config, dtype=torch.bfloat16 if of_16_bits else torch.float32)
    if spec["liger"]:
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, None)
    if spec["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if spec["lora"]:
        import peft

        if spec["load_in"]:
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=spec["checkpointing"])
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **spec["lora"]))
    model.train()
    return model


def _in_4_bits(cls: Any, config: Any, device: torch.device) -> Any:
    """From a folder of random weights: quantisation happens while they are loaded, as with a real checkpoint."""
    import tempfile

    quantisation = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as folder:
        with device:
            cls.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        return cls.from_pretrained(
            folder, quantization_config=quantisation, dtype=torch.bfloat16, device_map={"": device}
        )


class Clock:
    """Times optimizer steps, the first one apart, and ends when that is exact enough."""

    def __init__(self, spec: dict[str, Any], device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._began: float | None = None
        self.seconds: list[float] = []

    def done(self) -> bool:
        """To be called after each step: whether it was the last one needed."""
        now = _now(self._device)
        if self._began is None:
            limit_memory(self._spec["cap_gib"], self._device)
        else:
            self.seconds.append(_together(now - self._began, self._device))
        self._began = _now(self._device)
        is_timed = sum(self.seconds) >= self._spec["seconds"] or len(self.seconds) >= _MOST
        return is_timed and len(self.seconds) >= _FEWEST


def measure(spec: dict[str, Any], steps: Steps, micro_batch: int, device: torch.device) -> float:
    """Tokens/s of `micro_batch`, and a line in the file for it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(spec, device)
    steps(micro_batch, spec["batch"] // (micro_batch * _world_size()), clock)
    speed = spec["batch"] * spec["seq_len"] * len(clock.seconds) / sum(clock.seconds)
    row = {"micro_batch": micro_batch, "tokens_per_second": round(speed, 1), "steps": len(clock.seconds)}
    if device.type == "cuda":
        row["peak_allocated_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        row["peak_device_gib"] = round((torch.cuda.max_memory_reserved() + _outside_torch()) / 2**30, 3)
    if os.environ.get("RANK", "0") == "0":
        with Path(spec["rows"]).open("a") as file:
            file.write(json.dumps(row) + "\n")
    return speed


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def _together(seconds: float, device: torch.device) -> float:
    """The slowest rank's, so that all ranks decide alike."""
    if _world_size() == 1:
        return seconds
    slowest = torch.tensor(seconds, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def limit_memory(cap_gib: float | None, device: torch.device) -> None:
    """Leave torch's allocator what the rest of the process does not use of the cap."""
    if cap_gib is None or device.type == "cpu":
        return
    room = cap_gib * 2**30 - _outside_torch()
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / torch.cuda.mem_get_info()[1]))
    if torch.cuda.max_memory_reserved() > room:
        raise torch.OutOfMemoryError("over the cap")


def _outside_torch() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def prepared(spec: dict[str, Any], model: Any, device: torch.device) -> Steps:
    """What makes optimizer steps of a micro-batch and an accumulation until the clock says that it is enough."""
    method = spec["method"]
    if method == "trainer":
        return trainer_steps(spec, model)
    if method.startswith("zero"):
        step = deepspeed_step(model, int(method.removeprefix("zero")), spec)
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


def _adam(model: Any) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, fused=True)


def ddp_step(model: Any, device: torch.device) -> Step:
    wrapped = model
    if _world_size() > 1:
        ids = [device.index] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    optimizer = _adam(model)

    def step(batches: list[Batch]) -> None:
        for number, batch in enumerate(batches, start=1):
            waits = wrapped is not model and number < len(batches)
            with wrapped.no_sync() if waits else nullcontext():
                with torch.autocast(device.type, torch.bfloat16):
                    loss = wrapped(**batch).loss / len(batches)
                loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], _CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2_step(model: Any, *, reshard: bool) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in _layers(model):
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = _adam(model)

    def step(batches: list[Batch]) -> None:
        for number, batch in enumerate(batches, start=1):
            model.set_requires_gradient_sync(number == len(batches))
            (model(**batch).loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks of a transformer: the members of its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))
    return list(layers)


def deepspeed_step(model: Any, stage: int, spec: dict[str, Any]) -> Step:
    """The configuration that DeepSpeed's tutorials give for this stage."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": spec["micro_batches"][0],
        "train_batch_size": spec["batch"],
        "gradient_clipping": _CLIP,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=_adam(model), config=config)

    def step(batches: list[Batch]) -> None:
        engine.set_train_micro_batch_size(len(batches[0]["input_ids"]))
        engine.set_train_batch_size(spec["batch"])
        for batch in batches:
            engine.backward(engine(**batch).loss)
            engine.step()

    return step


class _Timed(transformers.TrainerCallback):
    """Ends a training when the clock says so."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = self._clock.done()


def trainer_steps(spec: dict[str, Any], model: Any) -> Steps:
    """The Trainer without DeepSpeed, with its own loop, optimizer and data loader."""

    def steps(micro_batch: int, accumulation: int, clock: Clock) -> None:
        arguments = transformers.TrainingArguments(
            output_dir=spec["folder"],
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=accumulation,
            max_steps=_MOST + 2,
            bf16=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            learning_rate=1e-5,
            ddp_find_unused_parameters=False,
            use_cpu=not torch.cuda.is_available(),
        )
        one = torch.randint(4, model.config.vocab_size, (spec["seq_len"],))
        data = [{"input_ids": one, "labels": one}] * (spec["batch"] * (_MOST + 2))
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[_Timed(clock)]).train()

    return steps


if __name__ == "__main__":
    main()
