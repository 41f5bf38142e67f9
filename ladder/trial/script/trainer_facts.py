"""What a look reports of a script that trains with the Trainer of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sized
from contextlib import suppress
from copy import copy
from dataclasses import replace
from inspect import getattr_static, signature
from pathlib import Path
from typing import Any

from transformers import Trainer

from ladder.trial.script import generating
from ladder.trial.script.facts import engine_facts, fsdp_facts, length_of_schedule, model_facts, sample_facts
from ladder.trial.script.hold import NotTakenHoldOfError
from ladder.trial.script.optimizer_count import counted_optimizer
from ladder.trial.script.samples import Samples, require_batch_size
from ladder.workload.script import OwnEngine, ScriptFacts


def trainer_facts(trainer: Trainer) -> ScriptFacts:
    """What its script would train by itself, as `trainer` begins. NotTakenHoldOfError where that is nothing."""
    own = trainer.args._ladder_own
    _require_training(trainer)
    return ScriptFacts(
        kind="trainer",
        **model_facts(trainer.model),
        micro_batch=own["per_device_train_batch_size"],
        accumulation=own["gradient_accumulation_steps"],
        dtype="bf16" if own["bf16"] else "fp16" if own["fp16"] else "fp32",
        engine=_engine_of(trainer, own),
        uses_cpu=own["use_cpu"],
        gradient_clipping=float(own["max_grad_norm"]),
        **(generating.facts_of(trainer, own) if generating.generates(trainer) else _facts_of_samples(trainer)),
        evaluates=trainer.eval_dataset is not None and (own["do_eval"] or str(own["eval_strategy"]) != "no"),
        checkpoints=str(getattr(own["save_strategy"], "value", own["save_strategy"])) != "no",
        overrides=tuple(_overrides(own)),
        **_optimizer_of(trainer, own),
    )


def _engine_of(trainer: Trainer, own: dict[str, Any]) -> OwnEngine | None:
    """What it trains on by itself. Its checkpointing is switched on only when it begins."""
    if own["auto_find_batch_size"]:
        return None
    if own["fsdp"]:
        found = fsdp_facts(trainer.model, _words_of_fsdp(trainer.args, own), **own["kernels"])
    else:
        found = engine_facts(trainer.model, _read(own["deepspeed"]) if own["deepspeed"] else None, **own["kernels"])
    if found is None:
        return None
    checkpoints = own["gradient_checkpointing"] or own["activation_checkpointing"] or found.checkpointing
    return replace(found, checkpointing=bool(checkpoints))


def _words_of_fsdp(arguments: Any, own: dict[str, Any]) -> dict[str, Any]:
    """What the Trainer makes of its arguments for accelerate's plugin; nothing where it has no way to ask."""
    asked = copy(arguments)
    asked.fsdp, asked.fsdp_config = own["fsdp"], own["fsdp_config"]
    with suppress(Exception):  # before transformers 5 it has another form
        return asked._process_fsdp_args() or {}
    return {}


def _optimizer_of(trainer: Trainer, own: dict[str, Any]) -> dict[str, Any]:
    """What it is called, by the arguments or by the class of the script's own, and what was counted of it."""
    named = str(getattr(own["optim"], "value", own["optim"]))
    makes = [name for name in _MAKERS if getattr_static(trainer, name, None) is not getattr_static(Trainer, name, None)]
    is_own = bool(makes) or trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
    try:
        usual, _ = Trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        if trainer.optimizer is None and _BOTH in makes:
            trainer.create_optimizer_and_scheduler(num_training_steps=1)
        made = trainer.optimizer or trainer.create_optimizer()
    except Exception:  # here its model is on the CPU, which some optimizers refuse
        return {"optimizer": f"that of {type(trainer).__name__}" if is_own else named}
    counts = counted_optimizer(made)
    return {"optimizer": type(made).__name__ if is_own and type(made) is not usual else named, "counted": counts}


_BOTH = "create_optimizer_and_scheduler"
_MAKERS = ("create_optimizer", _BOTH, "get_optimizer_cls_and_kwargs")
"""Methods of the Trainer by which a script makes an optimizer of its own."""


def _facts_of_samples(trainer: Trainer) -> dict[str, Any]:
    loader = trainer.get_train_dataloader()
    require_batch_size(loader)
    planned = planned_steps(trainer, loader)
    schedule = length_of_schedule(trainer.lr_scheduler) or planned
    return sample_facts(Samples(loader)) | {"planned_steps": planned, "schedule_steps": schedule}


def planned_steps(trainer: Any, loader: Any) -> int | None:
    """As the Trainer itself counts them; None where it has no way to ask, as before transformers 4.50."""
    with suppress(AttributeError):
        count, args = trainer.set_initial_training_values, trainer.args
        whole = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        total = {"total_train_batch_size": whole} if "total_train_batch_size" in signature(count).parameters else {}
        return int(count(args, loader, **total)[-1])
    return None


def _require_training(trainer: Trainer) -> None:
    args: Any = trainer.args
    generating.require_known_way(trainer)
    if args.max_steps <= 0 and args.num_train_epochs == 0:
        raise NotTakenHoldOfError("it is told to train no step: num_train_epochs is 0")
    if isinstance(trainer.train_dataset, Sized) and len(trainer.train_dataset) == 0:
        raise NotTakenHoldOfError("its training data set is empty")


def _overrides(own: dict[str, Any]) -> list[str]:
    said = []
    if own["deepspeed"]:
        name = own["deepspeed"] if isinstance(own["deepspeed"], str) else "its own"
        stays = ", but its scheduler stays" if own_schedule(own["deepspeed"]) else ""
        said.append(f"its DeepSpeed configuration ({name}{stays})")
    if own["fsdp"]:
        said.append("FSDP")
    if own["gradient_checkpointing"] or own["activation_checkpointing"]:
        said.append("its gradient checkpointing")
    if own["auto_find_batch_size"]:
        said.append("auto_find_batch_size")
    return said + [name for name, is_on in own["kernels"].items() if is_on]


def own_schedule(deepspeed: Any) -> Any:
    """The section of the script's own DeepSpeed configuration, a dictionary or a file; None without one."""
    return (_read(deepspeed) or {}).get("scheduler")


def _read(deepspeed: Any) -> Mapping[str, Any] | None:
    if isinstance(deepspeed, str | Path):
        deepspeed = json.loads(Path(deepspeed).read_text(encoding="utf-8"))
    return deepspeed if isinstance(deepspeed, Mapping) else None
