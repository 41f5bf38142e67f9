"""Taking hold of a training loop with DeepSpeed alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.utils.data import DataLoader

from ladder.optimizers.registry import OPTIMIZERS
from ladder.trial.model import set_checkpointing
from ladder.trial.script.facts import engine_facts, length_of_schedule
from ladder.trial.script.hold import Grip, NotTakenHoldOfError
from ladder.trial.script.loops import Loop, facts_of_loop
from ladder.trial.script.optimizer_count import counted_optimizer
from ladder.trial.script.planned import require_planned_loop
from ladder.trial.script.samples import rebatched
from ladder.trial.wrapping import wrap
from ladder.workload.script import ScriptFacts

_NAMES = ("args", "model", "optimizer", "model_parameters", "training_data")
"""The first arguments of `deepspeed.initialize`, in their order."""


def hold_deepspeed(grip: Grip) -> None:
    """From now on `deepspeed.initialize` makes the trial's engine, and the script's loader gives its batches."""
    loop = Loop(grip, "deepspeed")
    loaders: list[Any] = []

    def noted(own: Any, loader: Any, *arguments: Any, **options: Any) -> None:
        own(loader, *arguments, **options)
        loaders.append(loader)

    def initialized(own: Any, *arguments: Any, **options: Any) -> Any:
        if grip.holders:  # they make their engines themselves, of a second model too
            return own(*arguments, **options)
        given = dict[str, Any](zip(_NAMES, arguments, strict=False)) | options
        said = _own_config(given)
        if given.get("optimizer") or "optimizer" in said:
            loop.require_first()
        if loop.engine is not None or not (given.get("optimizer") or "optimizer" in said):
            # A model without an optimizer, such as one to compare with, is the script's own affair.
            return (given["model"], None, None, None) if grip.is_look else own(*arguments, **options)
        data = given.get("training_data")
        loader = _training_loader(loaders) if data is None else _loader_of(data, given, said, grip.spec.world_size)
        if grip.is_look:
            grip.looked(lambda: _facts_of_deepspeed(given, said, loader))
        loop.require_told(loader.batch_size)
        require_planned_loop(grip, given["model"], given.get("lr_scheduler"))
        ready = grip.engine(lambda: own(**_under(grip.spec.deepspeed, given, said)))
        loop.engine = ready[0]
        grip.made.schedule = grip.made.schedule or ready[3]  # which a configuration names
        set_checkpointing(loop.engine.module, grip.spec.candidates[0])
        if data is None:
            vars(loader).update(
                vars(rebatched(loader, grip.spec.candidates[0].micro_batch))
            )  # the script has it already
        loop.hold(loader if data is None else ready[2], lambda batch: batch)
        return ready

    def bounded(own: Any, engine: Any, is_boundary: bool) -> None:
        if engine is not loop.engine:  # its configuration says where a step of the trial's engine ends
            own(engine, is_boundary)

    def called(own: Any, engine: Any, *arguments: Any, **options: Any) -> None:
        if engine is loop.engine:
            grip.loop_end.note_step()
        own(engine, *arguments, **options)

    wrap(DataLoader, "__init__", noted)
    wrap(deepspeed.DeepSpeedEngine, "step", called)
    wrap(deepspeed, "initialize", initialized)
    wrap(deepspeed.DeepSpeedEngine, "set_gradient_accumulation_boundary", bounded)


def _training_loader(made: list[Any]) -> Any:
    """The first that was made with a data set in random order, else the first."""
    if not made:
        raise NotTakenHoldOfError(
            "no torch DataLoader was made before deepspeed.initialize() was called, nor was it given training_data, "
            "so its data cannot be looked at"
        )
    shuffled = [each for each in made if not isinstance(each.sampler, torch.utils.data.SequentialSampler)]
    return (shuffled or made)[0]


def _loader_of(data: Any, given: dict[str, Any], config: dict[str, Any], world_size: int) -> DataLoader[Any]:
    """As DeepSpeed makes one of `training_data`, with the micro-batch of the script's own `config`."""
    micro_batch = config.get("train_micro_batch_size_per_gpu")
    if micro_batch is None:
        accumulation = int(config.get("gradient_accumulation_steps") or 1)
        micro_batch = int(config.get("train_batch_size") or 1) // (accumulation * world_size)
    shuffles = not isinstance(data, torch.utils.data.IterableDataset)
    return DataLoader(data, batch_size=max(1, micro_batch), shuffle=shuffles, collate_fn=given.get("collate_fn"))


def _own_config(given: dict[str, Any]) -> dict[str, Any]:
    args = given.get("args")
    own = given.get("config") or given.get("config_params") or getattr(args, "deepspeed_config", None) or {}
    if isinstance(own, str | Path):
        own = json.loads(Path(own).read_text(encoding="utf-8"))
    return dict(own)


def _under(config: dict[str, Any], given: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """What is `given` to `deepspeed.initialize`, under the configuration of the trial; `said` is the script's own."""
    if getattr(given.get("args"), "deepspeed_config", None):
        given["args"].deepspeed_config = None
    kept = {name: said[name] for name in ("optimizer", "scheduler") if name in said}
    return _with_cpu_adam({**given, "config": {**copy.deepcopy(config), **kept}, "config_params": None})


def _with_cpu_adam(given: dict[str, Any]) -> dict[str, Any]:
    """With the states on the host DeepSpeed takes its own Adam, to which torch's is mapped. Others stay as they are."""
    from accelerate.utils import map_pytorch_optim_to_deepspeed

    offloads = "offload_optimizer" in given["config"]["zero_optimization"]
    if offloads and type(given.get("optimizer")) in (torch.optim.Adam, torch.optim.AdamW):
        given = {**given, "optimizer": map_pytorch_optim_to_deepspeed(given["optimizer"])}
    return given


def _facts_of_deepspeed(given: dict[str, Any], own: dict[str, Any], loader: DataLoader[Any]) -> ScriptFacts:
    def enabled(name: str) -> bool:
        return bool(own.get(name, {}).get("enabled"))

    optimizer = given.get("optimizer")
    named = own.get("optimizer", {}).get("type", "")
    facts = facts_of_loop(
        "deepspeed",
        given["model"],
        loader,
        accumulation=int(own.get("gradient_accumulation_steps") or 1),
        global_batch=None if own.get("gradient_accumulation_steps") else own.get("train_batch_size"),
        dtype="bf16" if enabled("bf16") else "fp16" if enabled("fp16") else "fp32",
        optimizer=type(optimizer).__name__ if optimizer is not None else named,
        counted=counted_optimizer(optimizer),
        engine=engine_facts(given["model"], own),
        schedule_steps=length_of_schedule(given.get("lr_scheduler"))
        or own.get("scheduler", {}).get("params", {}).get("total_num_steps"),
        gradient_clipping=float(own.get("gradient_clipping") or 0.0),
        overrides=("its DeepSpeed configuration",),
        # Two ranks that compile the same operator at once can wait for each other: it is built before.
        operators=_operators_of(named) if optimizer is None else (),
    )
    return facts


def _operators_of(named: str) -> tuple[str, ...]:
    """What DeepSpeed compiles for the optimizer that a configuration names."""
    known = OPTIMIZERS.get(named.lower())
    return (known.device_operator,) if known is not None and known.device_operator else ()
