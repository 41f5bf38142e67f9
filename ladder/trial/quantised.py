"""A model whose linear layers are held in 4 or 8 bits by bitsandbytes, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from ladder.events.protocol import TrialSpec
from ladder.trial.backends import backend_of
from ladder.trial.model_class import of_dtype
from ladder.trial.preload import unhide


def quantised_model(cls: Any, config: Any, spec: TrialSpec, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the device, one matrix quantised after another: there is never room for all of them in 16 bits."""
    unhide("bitsandbytes")
    import bitsandbytes
    from transformers.integrations import replace_with_bnb_linear

    with torch.device("meta"):
        model: PreTrainedModel = cls.from_config(config, **of_dtype(config, dtype))
    head = model.get_output_embeddings()
    kept = [name for name, module in model.named_modules() if module is head]
    replace_with_bnb_linear(model, modules_to_not_convert=kept, quantization_config=quantisation(spec, dtype))
    layers: Any = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)  # type: ignore[attr-defined]
    for module in model.modules():
        if isinstance(module, layers):
            module.weight = _quantised(module.weight, spec, dtype)
    for module in model.modules():
        _materialise(module, spec.device)
    model.tie_weights()  # what was one tensor on the meta device has become two
    model.initialize_weights()
    setattr(model, f"is_loaded_in_{spec.load_in}", True)
    return model


def quantisation(spec: TrialSpec, dtype: torch.dtype) -> BitsAndBytesConfig:
    """NF4 with double quantisation (Dettmers et al. 2023), or LLM.int8."""
    if spec.load_in == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype if backend_of(spec).divides_weights(spec) else torch.uint8,
    )


def _quantised(empty: Any, spec: TrialSpec, dtype: torch.dtype) -> Any:
    """A quantised parameter of random numbers in place of `empty`, which is on the meta device."""
    numbers = torch.empty(empty.shape, dtype=dtype, device=spec.device).normal_(std=0.02)
    settings = {name: value for name, value in vars(empty).items() if name in _SETTINGS}
    if spec.load_in == "8bit":  # `to` would leave what is on a GPU already as it is (bitsandbytes 0.50)
        from bitsandbytes.functional import int8_vectorwise_quant

        packed, scales, _ = int8_vectorwise_quant(numbers.half())
        parameter = type(empty)(packed, requires_grad=False, CB=packed, SCB=scales, **settings)
    else:
        parameter = type(empty)(numbers, requires_grad=False, **settings).to(spec.device)
    parameter._is_hf_initialized = True
    return parameter


_SETTINGS = (
    "blocksize",
    "compress_statistics",
    "quant_type",
    "quant_storage",
    "module",
    "has_fp16_weights",
)
"""What a parameter of bitsandbytes is made with. Its module keeps the scales, as FSDP2's shards cannot."""


def _materialise(module: torch.nn.Module, device: str) -> None:
    """Give the module's own tensors that have no memory yet some, as `Module.to_empty` does, and leave the others."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            empty = torch.empty_like(parameter, device=device)
            module._parameters[name] = torch.nn.Parameter(empty, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)
