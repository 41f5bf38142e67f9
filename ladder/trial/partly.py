"""A model of which only a part is trained: adapters beside frozen weights, or some modules frozen."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ladder.events.protocol import TrialSpec
from ladder.workload.trained import freeze_pattern


def only_partly_trained(model: Any, spec: TrialSpec) -> Any:
    """`model` with the adapters of the trial, as a PeftModel, or with the modules frozen that it names."""
    if spec.freeze:
        _freeze(model, spec.freeze)
    if spec.lora is None:
        return model
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if spec.prepare_kbit:  # checkpointing is the candidate's
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    kind = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM"}.get(spec.task)
    return get_peft_model(model, LoraConfig(task_type=kind, **spec.lora))


def _freeze(model: Any, names: tuple[str, ...]) -> None:
    parts = {**dict(model.named_modules()), **dict(model.named_parameters())}  # experts are parameters of one module
    for asked in names:
        frozen = [name for name in parts if freeze_pattern(asked).fullmatch(name)]
        if not frozen:
            known = ", ".join(list(parts)[1:6])
            raise ValueError(f"--freeze {asked} matches nothing of the model; it has {known} and others")
        for name in frozen:
            parts[name].requires_grad_(False)


def save_and_load_adapters(model: Any, weights: dict[str, torch.Tensor], folder: str | None) -> None:
    """Save the adapters of `model` as peft does, on rank 0, and load them again; RuntimeError if they then differ.

    `weights` are the gathered ones. They are kept only in `folder`.
    """
    if dist.get_rank() != 0:
        return
    from peft.utils import get_peft_model_state_dict, load_peft_weights

    with nullcontext(folder) if folder is not None else tempfile.TemporaryDirectory(prefix="ladder-adapters-") as place:
        model.save_pretrained(place, state_dict=weights, save_embedding_layers=False)
        loaded = load_peft_weights(place, device="cpu")
    saved = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    same = saved.keys() == loaded.keys() and all(torch.equal(saved[name].cpu(), loaded[name]) for name in saved)
    if not saved or not same:
        raise RuntimeError("the adapters that were loaded again are not those that were saved")
