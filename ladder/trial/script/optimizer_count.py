"""What a script's optimizer keeps and computes, asked of itself on tensors of the shapes of its parameters."""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ladder.workload.script import CountedOptimizer

_MOST_ELEMENTS = 1 << 20
"""Of a tensor that has values. Chosen: a step takes milliseconds; a larger one is cut along its first dimension."""
_MATRICES = ((64, 128), (64, 96))
"""Chosen: as many elements as 8-bit optimizers ask for; shorter tensors have states of 32 bits (bitsandbytes 0.50)."""


def counted_optimizer(optimizer: Any) -> CountedOptimizer | None:
    """What `optimizer` would keep for its parameters; None where it is none of torch's or cannot step here.

    A copy of it steps, with parameters of its own, so that nothing of the script's changes.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    elements, wide, short, products = 0, 0.0, 0.0, 0.0
    for group in optimizer.param_groups:
        shapes = Counter(tuple(each.shape) for each in group["params"] if each.requires_grad and each.numel())
        for shape, times in shapes.items():
            size = times * torch.Size(shape).numel()
            kept, kept_short = (_kept(optimizer, group, shape, dtype) for dtype in (torch.float32, torch.bfloat16))
            if kept is None or kept_short is None:
                return None
            elements, wide, short = elements + size, wide + size * kept[0], short + size * kept_short[0]
            products += size * kept[1]
    if not elements:
        return None
    return CountedOptimizer(
        states=wide / elements,
        states_of_16_bits=short / elements,
        products=products / elements,
        by_shape=any(_goes_by_shape(optimizer, group) for group in optimizer.param_groups),
    )


def _kept(
    optimizer: Any, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[float, float] | None:
    """Bytes of states, and operations of matrix products, for each element of a parameter; None if it cannot step."""
    elements = torch.Size(shape).numel()
    with suppress(Exception), FlopCounterMode(display=False) as flops:  # some ask for a value, or call kernels of C
        stepped = _Stepping(optimizer, group, [torch.empty(shape, dtype=dtype, device="meta")])
        stepped.step([torch.empty(shape, dtype=dtype, device="meta")])
        return stepped.new_bytes() / elements, flops.get_total_flops() / elements
    rows = min(shape[0], max(1, _MOST_ELEMENTS * shape[0] // elements)) if shape else 1
    values = torch.zeros((rows, *shape[1:]) if shape else (), dtype=dtype)
    stepped = _Stepping(optimizer, group, [values])
    with suppress(Exception):  # a kernel may be for GPUs alone: what the step began with is there
        stepped.step([torch.ones_like(values)])
        return stepped.new_bytes() / values.numel(), 0.0
    return (stepped.new_bytes() / values.numel(), 0.0) if stepped.new_bytes() else None


def _goes_by_shape(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Whether two matrices end elsewhere when they are steps of one flat tensor, as ZeRO has it; no where neither can
    be tried."""
    chance = torch.Generator().manual_seed(0)
    values, *gradients = ([torch.randn(shape, generator=chance) for shape in _MATRICES] for _ in range(3))
    values[1] *= 0.1  # an optimizer that scales by norms sees the difference
    apart = _Stepping(optimizer, group, values)
    try:
        for each in gradients:
            apart.step(each)
    except Exception:
        return False
    together = _Stepping(optimizer, group, [_flat(values)])
    try:
        for each in gradients:
            together.step([_flat(each)])
    except Exception:
        return True
    before = _flat(values)
    moved, moved_together = (_flat(each.parameters) - before for each in (apart, together))
    return not torch.allclose(moved, moved_together, rtol=0.0, atol=0.01 * float(moved.abs().max()))


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in tensors])


class _Stepping:
    """A copy of an optimizer as it begins, for tensors as the only parameters of one of its groups."""

    def __init__(self, optimizer: Any, group: Mapping[str, Any], values: Sequence[torch.Tensor]) -> None:
        self.parameters = [torch.nn.Parameter(each.clone()) for each in values]
        self._own = {id(each) for each in group["params"]}
        self._made: dict[int, Any] = {}
        self._copy = self._copied(optimizer)
        self._known = [*_tensors(vars(self._copy))]

    def _copied(self, optimizer: Any) -> Any:
        """Of `optimizer`, and of those that it is made of, with the tensors in place of the group's parameters."""
        if (made := self._made.get(id(optimizer))) is not None:
            return made
        made = self._made[id(optimizer)] = object.__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            vars(made)[name] = self._within(value)
        made.state = defaultdict(dict)
        made.param_groups = [
            {**group, **({} if group.get("lr") is None else {"lr": 0.01}), "params": self.parameters}
            for group in optimizer.param_groups  # a warm-up begins with a rate of 0
            if self._own.intersection(map(id, group["params"]))
        ]
        vars(made)["step"] = partial(inspect.unwrap(type(made).step), made)  # without torch's hooks, which count steps
        return made

    def _within(self, value: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            return self._copied(value)
        if type(value) is dict:
            return {name: self._within(each) for name, each in value.items()}
        if type(value) is list:
            return [self._within(each) for each in value]
        return copy.copy(value) if isinstance(value, dict | list) else value

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            self._copy.step()

    def new_bytes(self) -> int:
        """Of tensors that were not there before."""
        known = {id(each) for each in self._known}
        found = {id(each): each.numel() * each.element_size() for each in _tensors(vars(self._copy))}
        return sum(size for each, size in found.items() if each not in known)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors(vars(value))
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
