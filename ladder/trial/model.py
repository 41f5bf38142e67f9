"""The model with random weights, its batches and its optimizer; nothing is downloaded and no remote code is run."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from ladder.events.protocol import TrialSpec
from ladder.events.step_policy import CandidateSpec
from ladder.trial.model_class import auto_class, model_config, of_dtype
from ladder.trial.optimizers import optimizer_of
from ladder.trial.partly import only_partly_trained
from ladder.trial.techniques import techniques_of

_REACH_OF_A_STEP, _MOST_TIMES = 8000.0, 20.0
"""How far a step may move what adapters add, in units of the usual rate; and the most times that rate. Measured with
128 to 2048 hidden values and ranks of 4 to 256: losses then fall by 8 % or more in ten steps and differ by 0.8 % at
most between kernels that round otherwise. With five times the reach they jump, and differ by 6 %."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DISABLE = "gradient_checkpointing_disable"
_DRAWN_AT_ONCE = 1 << 24
"""Elements. Chosen: 64 MiB in fp32, which takes the GPU about a millisecond."""


def build_model(spec: TrialSpec, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model with random weights of type `dtype` on `device`; stage 3 partitions it from the start.

    On "meta" its parameters are on the CPU, with memory that nothing was written to: another rank sends what they hold.
    """
    for technique in techniques_of(spec):
        technique.before_model()
    torch.manual_seed(spec.seed)
    config = model_config(spec.model_config_json)
    if spec.parity:
        _switch_off_dropout(config)
    # While this object exists, transformers uses zero.Init, as in the Trainer.
    keep_alive = HfDeepSpeedConfig(spec.deepspeed) if spec.zero_stage == 3 and spec.load_in is None else None
    model: PreTrainedModel
    if spec.load_in is not None:
        from ladder.trial.quantised import quantised_model  # needs bitsandbytes

        model = quantised_model(auto_class(config, spec.task), config, spec, dtype)
    else:
        # Buffers are no part of what is sent.
        place = init_empty_weights(include_buffers=False) if device == "meta" else torch.device(device)
        with place, DrawnOn(spec.device) if device == "cpu" != spec.device else nullcontext():
            model = auto_class(config, spec.task).from_config(config, **of_dtype(config, dtype))
        if device == "meta":
            _make_room(model)
    del keep_alive
    for technique in techniques_of(spec):
        technique.change_model(model)
    model = only_partly_trained(model, spec)
    if spec.parity:
        _set_weights_by_name(model, spec)
    model.train()
    return model


_DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class DrawnOn(TorchDispatchMode):
    """Within it, random numbers for tensors on the CPU are drawn on `device` and copied.

    One core of a CPU draws 70 to 220 million a second (measured on two hosts): a minute and more for a 7B model. Copied
    by the driver straight into memory that is touched for the first time, its weights in fp32 take 11 s (measured on a
    host with H100s). So they go through one piece of memory, from which all cores of the rank copy them on.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._between: torch.Tensor | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        is_elsewhere = func in _DRAWS and args[0].device.type == "cpu" and args[0].is_contiguous()
        if not is_elsewhere or given.get("generator") is not None:  # which is of one device
            return func(*args, **given)
        for piece in args[0].view(-1).split(_DRAWN_AT_ONCE):
            drawn = func(torch.empty_like(piece, device=self._device), *args[1:], **given)
            piece.copy_(self._on_the_host(drawn))
        return args[0]

    def _on_the_host(self, drawn: torch.Tensor) -> torch.Tensor:
        if self._between is None or self._between.dtype != drawn.dtype:
            pinned = self._device == "cuda"
            self._between = torch.empty(_DRAWN_AT_ONCE, dtype=drawn.dtype, device="cpu", pin_memory=pinned)
        return self._between[: drawn.numel()].copy_(drawn)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._between = None
        if self._device == "cuda":
            torch.cuda.empty_cache()  # so that no piece counts as memory of the training


def _make_room(model: PreTrainedModel) -> None:
    """Put parameters that are on no device on the CPU; the kernel gives them memory once somebody writes there."""
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            if old.is_meta:
                empty = torch.empty_like(old, device="cpu")
                setattr(module, name, torch.nn.Parameter(empty, old.requires_grad))
    model.tie_weights()  # making them on no device made two of those that one weight serves


def _switch_off_dropout(config: Any) -> None:
    """Dropout is random, so losses would differ from engine to engine."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def _whole(parameter: torch.nn.Parameter) -> AbstractContextManager[Any]:
    """Within it, a parameter that stage 3 has divided is whole, and what rank 0 makes of it stays."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    whole: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
    return whole


def _set_weights_by_name(model: torch.nn.Module, spec: TrialSpec) -> None:
    """Fill matrices with numbers that depend only on their name and shape: stage 3 draws them in another order."""
    for name, parameter in model.named_parameters():
        if spec.load_in is not None and not parameter.requires_grad:
            continue  # every rank made it alike, whatever the stage, and it may be packed
        with _whole(parameter), torch.no_grad():
            if parameter.dim() > 1:
                generator = torch.Generator(spec.device).manual_seed(zlib.crc32(name.encode()))
                numbers = torch.randn(parameter.shape, generator=generator, device=spec.device, dtype=parameter.dtype)
                parameter.copy_(0.02 * numbers)


def set_checkpointing(model: PreTrainedModel, candidate: CandidateSpec) -> None:
    """Checkpoint the layers that `candidate` says, as the emitted Trainer arguments will do."""
    is_new = hasattr(model, "activation_checkpointing_enable")  # since transformers 5.23; 6 removes the old name
    if every := candidate.checkpoint_every:
        # Passed only if needed: transformers before 5.18 or 5.23 does not know them.
        options: dict[str, Any] = {"every_n_layers": every} if every > 1 else {}
        if candidate.offload_activations:
            options["offload"] = True
        enable = model.activation_checkpointing_enable if is_new else model.gradient_checkpointing_enable
        enable({"use_reentrant": False}, **options)
    elif getattr(model, "supports_gradient_checkpointing", True):
        disable = model.activation_checkpointing_disable if is_new else getattr(model, _DISABLE, None)
        if disable is not None:  # a module of a script's own may know nothing of it
            disable()


def make_batch(
    spec: TrialSpec, vocab_size: int, micro_batch: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Full-length sequences of random tokens, [micro_batch, seq_len], and labels of the same shape.

    Sequence-to-sequence models get targets of the same length as their inputs.
    """
    shape = (micro_batch, spec.seq_len)
    ids = torch.randint(4, vocab_size, shape, generator=generator).to(spec.device)
    labels = (
        torch.randint(4, vocab_size, shape, generator=generator).to(spec.device) if spec.task == "seq2seq-lm" else ids
    )
    return {"input_ids": ids, "labels": labels}


def make_optimizer(spec: TrialSpec, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the Trainer and accelerate would use: DeepSpeed's own if offloaded, otherwise torch's."""
    usual = optimizer_of(spec)
    groups = _parameter_groups(parameter for parameter in model.parameters() if parameter.requires_grad)
    rate = usual.rate_of_comparison if spec.parity else 1e-5
    rate *= _times_for_adapters(spec.lora, model) if spec.parity and spec.lora is not None else 1
    if "offload_optimizer" in spec.deepspeed.get("zero_optimization", {}):
        return usual.make_for_host(groups, rate)
    for technique in techniques_of(spec):
        if (special := technique.make_optimizer(groups, rate, spec)) is not None:
            return special
    return usual.make(groups, rate)


def _times_for_adapters(lora: dict[str, Any], model: Any) -> float:
    """How many times the usual rate lets the losses of adapters fall without jumping.

    Copies of whole modules beside them jump with more than the usual rate. Adam's step has the rate's length in every
    element. So B's moves an output by alpha / r · r · √h in units of the rate and of the matrices' own numbers, and A's
    by alpha / r · h · √r, with h hidden values.
    """
    if lora.get("modules_to_save"):
        return 1.0
    hidden, rank = model.config.get_text_config().hidden_size, lora["r"]
    reach: float = lora["lora_alpha"] * (hidden**0.5 + hidden / rank**0.5)
    return min(_MOST_TIMES, _REACH_OF_A_STEP / reach)


def forget_steps(optimizer: Any) -> None:
    """Reset the step count of a DeepSpeed optimizer, so that Adam's bias correction starts as in other engines.

    To create Adam's states, stage 0 takes a step on zero gradients (FP16_UnfusedOptimizer.initialize_optimizer_states).
    It changes no weight, but it is counted: the next steps would be shorter by 25, 20 and 16 %.
    """
    for state in getattr(optimizer, "optimizer", optimizer).state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()


def _parameter_groups(parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices and all others in two groups for weight decay, as in the Trainer. Stage 3 keeps shapes in `ds_shape`."""
    everything = list(parameters)
    matrices = [p for p in everything if len(getattr(p, "ds_shape", p.shape)) > 1]
    rest = [p for p in everything if len(getattr(p, "ds_shape", p.shape)) <= 1]
    return [{"params": group, "weight_decay": 0.0} for group in (matrices, rest) if group]
