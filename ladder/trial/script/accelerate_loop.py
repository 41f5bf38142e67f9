"""Taking hold of a training loop with accelerate."""

from __future__ import annotations

import os
import sys
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import send_to_device
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper, DummyOptim
from torch.utils.data import DataLoader

from ladder.trial.backends import backend_of
from ladder.trial.model import set_checkpointing
from ladder.trial.script.facts import engine_facts, fsdp_facts, length_of_schedule
from ladder.trial.script.hold import Grip, NotTakenHoldOfError
from ladder.trial.script.loops import Loop, facts_of_loop
from ladder.trial.script.optimizer_count import counted_optimizer
from ladder.trial.script.planned import require_planned_loop
from ladder.trial.script.samples import rebatched
from ladder.trial.techniques import precision_of
from ladder.trial.wrapping import wrap
from ladder.workload.script import OwnEngine, ScriptFacts

_TRACKING = ("init_trackers", "log", "end_training")


def hold_accelerate(grip: Grip) -> None:
    """From now on every Accelerator of this process prepares what the trial says."""
    loop = Loop(grip, "accelerate")

    def made(own: Any, accelerator: Any, *arguments: Any, **options: Any) -> None:
        if "trainer" not in grip.holders:  # which makes its own, as its arguments say
            grip.holders.add("accelerate")
            accelerator._ladder_own = dict(options)
            options |= _options_of_accelerate(grip, is_first=loop.engine is None)
        elif not _is_asked_by_the_script():  # the Trainer's is the one that counts, whatever one the script made before
            AcceleratorState._reset_state()
        elif not grip.is_look:
            options["mixed_precision"] = precision_of(grip.spec)
        own(accelerator, *arguments, **options)

    def prepared(own: Any, accelerator: Any, *things: Any, **options: Any) -> Any:
        loaders = [each for each in things if isinstance(each, DataLoader)]
        models = [each for each in things if isinstance(each, torch.nn.Module)]
        if "trainer" in grip.holders and len(models) == len(things) and _is_asked_by_the_script():
            return things[0] if len(things) == 1 else things  # its Trainer prepares them, in its own way
        if not (loaders and models and hasattr(accelerator, "_ladder_own")):
            grip.made.schedule = grip.made.schedule or _schedule_in(things)
            return own(accelerator, *things, **options)
        loop.require_first()
        if grip.is_look:
            grip.looked(lambda: _facts_of_accelerate(accelerator, models[0], loaders[0], things))
        loop.require_told(loaders[0].batch_size)
        require_planned_loop(grip, models[0], _schedule_in(things))
        accelerator.dataloader_config.split_batches = False  # the candidate's micro-batch is that of a rank
        micro_batch = grip.spec.candidates[0].micro_batch
        changed = [rebatched(each, micro_batch) if each is loaders[0] else each for each in things]
        ready = grip.engine(lambda: own(accelerator, *changed, **options))
        loop.engine, loop.accelerator = ready[_place(models[0], things)], accelerator
        set_checkpointing(loop.model, grip.spec.candidates[0])
        loop.hold(ready[_place(loaders[0], things)], lambda batch: send_to_device(batch, accelerator.device))
        return ready

    wrap(accelerate.Accelerator, "__init__", made)
    wrap(accelerate.Accelerator, "prepare", prepared)
    _hold_steps(grip, loop)
    if not grip.is_run:
        for name in _TRACKING:
            wrap(accelerate.Accelerator, name, lambda *_, **__: None)


def _hold_steps(grip: Grip, loop: Loop) -> None:
    """Let the trial decide where an optimizer step ends, and see what the loop clips."""

    def ends_step(accelerator: Any) -> None:
        accelerator.gradient_state._set_sync_gradients(loop.ends_step)

    def stepped(own: Any, accelerator: Any, loss: Any, *arguments: Any, **options: Any) -> Any:
        if loop.engine is not None:  # whether or not the loop asks accelerate when to step
            ends_step(accelerator)
            loop.note_loss(loss)
        return own(accelerator, loss, *arguments, **options)

    def decided(own: Any, accelerator: Any) -> None:
        own(accelerator)
        if loop.engine is not None:  # before forward, where DDP decides whether to reduce
            ends_step(accelerator)

    def clipped(own: Any, accelerator: Any, parameters: Any, max_norm: float, *given: Any, **options: Any) -> Any:
        if loop.engine is not None:
            loop.clipping = float(max_norm)
            if grip.spec.uses_deepspeed:
                # accelerate leaves it to the configuration. That of a trial has none yet: from the second step on.
                loop.engine.optimizer.clip_grad = loop.clipping
        return own(accelerator, parameters, max_norm, *given, **options)

    def accumulated(own: Any, *arguments: Any, **options: Any) -> Any:
        loop.asks_when_to_step = True
        return own(*arguments, **options)

    def called(own: Any, *arguments: Any, **options: Any) -> Any:
        loop.note_step()
        return own(*arguments, **options)

    for optimizer in (AcceleratedOptimizer, DeepSpeedOptimizerWrapper):
        wrap(optimizer, "step", called)
    wrap(accelerate.Accelerator, "accumulate", accumulated)
    wrap(accelerate.Accelerator, "clip_grad_norm_", clipped)
    wrap(accelerate.Accelerator, "backward", stepped)
    if not grip.is_look and not grip.spec.uses_deepspeed:
        wrap(accelerate.Accelerator, "_do_sync", decided)


def _is_asked_by_the_script() -> bool:
    frame: Any = sys._getframe(1)
    while frame.f_globals["__name__"].startswith(("ladder.", "accelerate.")):
        frame = frame.f_back
    return not frame.f_globals["__name__"].startswith(("transformers.", "trl."))


def _place(thing: Any, things: tuple[Any, ...]) -> int:
    return next(place for place, each in enumerate(things) if each is thing)


def _options_of_accelerate(grip: Grip, is_first: bool) -> dict[str, Any]:
    """What a trial says. A second Accelerator, made for its `is_main_process`, shares what the first has set up."""
    changes: dict[str, Any] = {} if grip.is_run else {"log_with": None, "project_dir": grip.script.scratch}
    if grip.is_look:
        return changes | {"cpu": True, "mixed_precision": "no", "deepspeed_plugin": None, "fsdp_plugin": None}
    accumulation = grip.spec.deepspeed["gradient_accumulation_steps"]
    changes |= {"gradient_accumulation_steps": accumulation, "gradient_accumulation_plugin": None}
    if not is_first:
        return changes
    options = backend_of(grip.spec).accelerator_options(grip.spec)
    return {**changes, **options, "mixed_precision": precision_of(grip.spec)}


def _accumulation_of(accelerator: Any) -> int:
    """As the script says it; a DeepSpeed plugin that names a number overrides what accelerate was told."""
    plugin = accelerator._ladder_own.get("deepspeed_plugin")
    named = (getattr(plugin, "deepspeed_config", None) or {}).get("gradient_accumulation_steps")
    return named if isinstance(named, int) else int(accelerator.gradient_accumulation_steps)


def _schedule_in(things: Any) -> Any:
    return next(filter(length_of_schedule, things), None)


def _engine_of(accelerator: Any, model: Any) -> OwnEngine | None:
    """What it trains on by itself, as far as the script says it; its launcher may say otherwise."""
    own = accelerator._ladder_own
    if sharded := own.get("fsdp_plugin"):
        return fsdp_facts(model, vars(sharded))
    plugin = own.get("deepspeed_plugin")
    return engine_facts(model, None if plugin is None else getattr(plugin, "deepspeed_config", None) or {})


def _facts_of_accelerate(accelerator: Any, model: Any, loader: DataLoader[Any], things: Any) -> ScriptFacts:
    own = accelerator._ladder_own
    if any(isinstance(each, DummyOptim) for each in things):
        raise NotTakenHoldOfError(
            "its optimizer is a DummyOptim, which stands for that of a DeepSpeed file, and trials replace the file; "
            "make the optimizer in the script"
        )
    optimizer = next((each for each in things if isinstance(each, torch.optim.Optimizer)), None)
    precision = str(own.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no")
    return facts_of_loop(
        "accelerate",
        model,
        loader,
        micro_batch=(loader.batch_size or 1) // (accelerator.num_processes if accelerator.split_batches else 1),
        accumulation=_accumulation_of(accelerator),
        dtype=precision if precision in ("bf16", "fp16") else "fp32",
        optimizer=type(optimizer).__name__ if optimizer is not None else "",
        counted=counted_optimizer(optimizer),
        engine=_engine_of(accelerator, model),
        schedule_steps=length_of_schedule(_schedule_in(things)),
        overrides=("its DeepSpeed plugin",) if own.get("deepspeed_plugin") else (),
    )
