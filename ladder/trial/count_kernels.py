"""What kernels on a GPU keep, read and write, where code runs on tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

_PRODUCTS, _BATCHED = ("mm", "conv"), "bmm"
"""Parts of the names of operations whose time follows from their arithmetic, and of those with a product for each head,
which may have too little of it."""
_ENOUGH = 150.0
"""Operations for each byte that a batched product has to have for that. Derived: data sheets of A100 (156), H200 (206)
and H100 (295)."""
_FREE = ("detach", "_unsafe_view", "empty", "lift_fresh")
"""Parts of the names of operations that start no kernel."""
_ANSWERS = {
    **dict.fromkeys(("aten::all", "aten::_is_all_true", "aten::eq.Scalar"), True),
    **dict.fromkeys(("aten::any", "aten::lt.Scalar"), False),
}
"""What is answered where code asks for a value, by the operation that makes it: nothing is masked, no token pads, and
no random number is so small that a layer is left out."""


def storage_of(tensor: Tensor) -> int:
    """Which memory `tensor` would lie in."""
    return int(tensor.untyped_storage()._cdata)


class Kernels(TorchDispatchMode):
    """Counts the kernels that run in blocks, what they read and write, and which products are slow ones."""

    counting: Kernels
    """The newest, for kernels that stand for others (`RankTechnique.stand_in`)."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.times = False, 0
        """Whether a block runs, and for how many of the model it stands."""
        self.made_outside: set[int] = set()
        """Storages that no block made."""
        self.number = self.from_python = 0
        self.moved = self.flops_32 = self.masked = self.biased = self.dropped = 0
        Kernels.counting = self
        self._asked: dict[int, str] = {}
        """By storage of a single boolean: the operation that made it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "aten::_local_scalar_dense" and args[0].dtype == torch.bool:
            return _ANSWERS[self._asked[storage_of(args[0])]]
        if name == "aten::_grouped_mm" and args[0].dtype == torch.float32:  # devices take it, the meta device does not
            result = func(*(each.bfloat16() for each in args[:2]), *args[2:], **(kwargs or {})).float()
        else:
            result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.bool and result.numel() == 1:
            self._asked[storage_of(result)] = name
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if not func.is_view:
            change = self.made_outside.difference_update if self.inside else self.made_outside.update
            change(map(storage_of, made))
        if self.times and made and not func.is_view and not any(part in name for part in _FREE):
            self.number += self.times
            read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            moved = self.times * sum(each.numel() * each.element_size() for each in (*read, *made))
            if not any(part in name for part in _PRODUCTS):
                self.moved += moved
            elif (flops_of := flop_registry.get(func._overloadpacket)) is not None:
                flops = self.times * flops_of(*args, **(kwargs or {}), out_val=result)
                if read[0].dtype == torch.float32:
                    self.flops_32 += flops
                elif _BATCHED in name and flops < _ENOUGH * moved:
                    self.moved += moved
        return result

    def started_from_python(self, tensors: Sequence[Any]) -> None:
        """Count one kernel that reads and writes these."""
        self.number, self.from_python = self.number + self.times, self.from_python + self.times
        moved = sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))
        self.moved += self.times * moved


class AsOnGpus(TorchFunctionMode):
    """Attention and dropout keep and move what their kernels on a GPU do; the meta device would write them out."""

    def __init__(self, kernels: Kernels, losses: set[torch.dtype] | None) -> None:
        super().__init__()
        self._kernels, self._losses = kernels, losses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            mask = given.get("attn_mask", args[3] if len(args) > 3 else None)
            drops = given.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0
            scores = args[0].shape[:3].numel() * args[1].shape[2] * self._kernels.times
            self._kernels.dropped += scores * drops
            if mask is not None:
                self._kernels.masked += args[0].numel() * self._kernels.times
                self._kernels.biased += scores * mask.requires_grad
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.empty_like(mask, dtype=args[0].dtype)
            return _Attention.apply(*args[:3], mask)
        if func is functional.dropout and _drops(*args, **given):
            return _Dropout.apply(args[0])
        if func is functional.cross_entropy and self._losses is not None:
            self._losses.add(args[0].dtype)
        return func(*args, **given)


class Autocast(TorchFunctionMode):
    """What autocast does on a GPU to the operations that models use; the meta device has none.

    The lists are torch's: https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior
    """

    _NARROW = (
        *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum"),
        *("conv1d", "conv2d", "conv3d", "scaled_dot_product_attention", "_grouped_mm", "grouped_mm"),
    )
    _WIDE = (
        *("exp", "log", "log1p", "pow", "__pow__", "__rpow__", "rsqrt", "reciprocal", "softmax", "log_softmax"),
        *("softplus", "layer_norm", "group_norm", "norm", "sum", "prod", "cumsum", "cross_entropy", "nll_loss"),
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        if name in self._NARROW:
            args, given = tree_map(_narrow, (args, given))
        elif name in self._WIDE and not given.get("dtype"):
            args, given = tree_map(_wide, (args, given))
        return func(*args, **given)


def _narrow(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _wide(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _drops(inputs: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """The arguments are those of torch's dropout."""
    return training and p > 0


class _Attention(torch.autograd.Function):
    """What SDPA's kernels on GPUs keep: their inputs and output, and a number in 32 bits for each query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        same = query.shape[3] == value.shape[3]
        # Laid out as the queries are: where these were put together, what comes next has to copy it.
        result = torch.empty_like(query if same else query[..., :1].expand(*query.shape[:3], value.shape[3]))
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask, *_ = ctx.saved_tensors
        of_mask = torch.empty_like(mask) if ctx.needs_input_grad[3] else None
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_mask


class _Dropout(torch.autograd.Function):
    """A kernel that keeps a mask of one byte a value."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        mask = torch.ones_like(inputs, dtype=torch.bool)
        ctx.save_for_backward(mask)
        return inputs * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return gradients[0].mul(mask)
