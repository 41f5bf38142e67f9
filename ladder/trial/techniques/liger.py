"""Liger's kernels in a rank, and what they make of a model: its own registry says which it knows.

Its kernels run on GPUs alone, so where a model is counted, stand-ins without memory take their places: each keeps its
inputs, as they do.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ladder.trial.techniques import RankTechnique, UnknownKernelError

_IN_PLACE = "Rope"
"""In the names of kernels that change queries and keys where they are, and keep only what they are multiplied with."""
_EXPERTS = "FusedMoE"
_ABSENT = object()
_KNOWN, _OTHERS = ("RMSNorm", "LayerNorm", "SiLUMul", "GELUMul", _IN_PLACE), ("Fused", "Modulated")
"""Of the kernels that stand-ins can stand for, parts of their names; and of others that have these too, but do more."""


class Liger(RankTechnique):
    evaluation_arguments = {"skip_logits": True}  # noqa: RUF012
    can_be_followed = True

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        """What was at a name of a module or class before; `_ABSENT` for nothing."""

    def before_model(self) -> None:
        """Liger also replaces names in transformers' modules. A model that is built after that has more of its kernels
        than the Trainer gives one: OLMo-2's took 15 % less memory on one H200, and was 14 % faster."""
        while self._replaced:
            place, name, before = self._replaced.pop()
            if before is _ABSENT:
                delattr(place, name)
            else:
                setattr(place, name, before)

    def change_model(self, model: PreTrainedModel) -> None:
        """As the Trainer's `use_liger_kernel` does. RuntimeError if that would silently have no effect."""
        from transformers.integrations.liger import apply_liger_kernel  # imports Triton, which other ranks do not need

        before = [(place, dict(vars(place))) for place in _places()]
        apply_liger_kernel(model, None)
        for place, names in before:
            now = dict(vars(place))
            self._replaced += [
                (place, name, value) for name, value in names.items() if now.get(name, value) is not value
            ]
            if inspect.isclass(place):  # modules import more names by themselves
                self._replaced += [(place, name, _ABSENT) for name in now.keys() - names.keys()]
        if "forward" not in vars(model):
            raise RuntimeError(f"liger-kernel has no fused loss for {type(model).__name__}")

    def stand_in(self, model: PreTrainedModel) -> bool:
        cross_entropy = functional.cross_entropy
        try:
            self.change_model(model)
        except (ImportError, RuntimeError):
            return False
        functional.cross_entropy = cross_entropy
        del model.forward
        for name, module in list(sys.modules.items()):
            if name.startswith("liger_kernel.ops"):
                for _, kernel in inspect.getmembers(module, inspect.isclass):
                    if not issubclass(kernel, torch.autograd.Function) or kernel is torch.autograd.Function:
                        continue
                    (_stand_in_for_experts if _EXPERTS in kernel.__name__ else _stand_in)(kernel)
        return True


def _places() -> list[Any]:
    """Where Liger replaces names: the modules of transformers' models, their classes, and torch's functions."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.models.")]
    classes = {
        id(value): value
        for module in modules
        for value in list(vars(module).values())
        if inspect.isclass(value) and value.__module__.startswith("transformers.models.")
    }
    return [*modules, *classes.values(), functional]


def _stand_in(kernel: Any) -> None:
    from ladder.trial.count_kernels import Kernels  # of a process that counts, and of no rank

    name = kernel.__name__
    in_place = _IN_PLACE in name
    is_known = any(part in name for part in _KNOWN) and not any(part in name for part in _OTHERS)

    def forward(ctx: Any, *args: Any) -> Any:
        if not is_known:
            raise UnknownKernelError(kernel.__name__)
        tensors = [each for each in args if isinstance(each, Tensor)]
        ctx.count = len(args)
        ctx.save_for_backward(*(tensors[2:] if in_place else tensors))
        if in_place:
            Kernels.counting.started_from_python([*tensors, *tensors[:2]])
            return torch.empty_like(tensors[0]), torch.empty_like(tensors[1])
        Kernels.counting.started_from_python([*tensors, tensors[0]])
        return torch.empty_like(tensors[0])

    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors
        Kernels.counting.started_from_python([*gradients, *saved, *(gradients if in_place else saved)])
        made = list(gradients) if in_place else [torch.empty_like(each) for each in saved]
        return (*made, *[None] * (ctx.count - len(made)))

    kernel.forward, kernel.backward = staticmethod(forward), staticmethod(backward)


def _stand_in_for_experts(kernel: Any) -> None:
    """All experts at once: their gated product, the sum of what a token's experts make of it, and where it went."""
    from ladder.trial.count_kernels import Kernels  # of a process that counts, and of no rank

    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows, start = chosen.numel(), Kernels.counting.started_from_python
        gates, inner = x.new_empty(rows, gate_up.shape[1]), x.new_empty(rows, down.shape[2])
        of_experts = x.new_empty(rows, down.shape[1])  # as many as are read, once for each expert of a token
        places = [torch.empty_like(chosen) for _ in range(3)]
        for place in places:
            start([chosen, place])
        for tensors in ([of_experts, gates, inner], [inner, of_experts], [of_experts, weights, x]):
            start(tensors)
        ctx.save_for_backward(x, gate_up, down, weights, gates, *places)
        return torch.empty_like(x)

    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, gate_up, down, weights, gates, *_ = ctx.saved_tensors
        start = Kernels.counting.started_from_python
        of_gates, inner = torch.empty_like(gates), gates.new_empty(len(gates), down.shape[2])
        of_experts = gates.new_empty(len(gates), down.shape[1])
        made = [torch.empty_like(each) for each in (x, gate_up, down, weights)]
        products = ([of_experts, gates, of_gates, inner, weights], [of_gates, of_experts], [inner, of_experts, made[2]])
        for tensors in (*products, [of_gates, of_experts, made[1]], [of_experts, x]):
            start(tensors)
        return (*made[:3], None, made[3])

    kernel.forward, kernel.backward = staticmethod(forward), staticmethod(backward)


TECHNIQUE = Liger()
