"""A model of which only a part is trained: adapters beside frozen weights, or some modules frozen."""

from __future__ import annotations

from typing import Any

from ladder.events.protocol import TrialSpec
from ladder.workload.trained import freeze_pattern


def only_partly_trained(model: Any, spec: TrialSpec) -> Any:
    """`model` with the adapters of the trial, as a PeftModel, or with the modules frozen that it names."""
    if spec.freeze:
        _freeze(model, spec.freeze)
    if spec.lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    kind = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM"}.get(spec.task)
    return get_peft_model(model, LoraConfig(task_type=kind, **spec.lora))


def _freeze(model: Any, names: tuple[str, ...]) -> None:
    patterns = [freeze_pattern(name) for name in names]
    for name, module in model.named_modules():
        if any(pattern.fullmatch(name) for pattern in patterns):
            module.requires_grad_(False)
