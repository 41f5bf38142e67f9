"""Rungs. Each backend has a table of its own: `backends.registry.RUNGS_BY_NAME` has them all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Place = Literal["none", "cpu", "nvme"]
Knob = tuple[str, bool | int]
Through = Literal["model", "configuration", "accelerate"]
"""What a technique gets into an engine through: the ranks and their model, with any backend; DeepSpeed's configuration;
or accelerate, by its environment variables."""


@dataclass(frozen=True)
class Rung:
    """A step of the documented ladder or beyond: what is divided, and where optimizer and parameters live."""

    name: str
    stage: int
    """What is divided, as in ZeRO: nothing, the optimizer's states, gradients too (2), or parameters too (3)."""
    offload_optimizer: Place = "none"
    offload_param: Place = "none"
    knobs: tuple[Knob, ...] = ()
    backend: str = field(kw_only=True)
    """The name of the backend that trains its engines."""
    open_to: frozenset[Through] = field(default=frozenset({"model"}), kw_only=True)
    """What techniques get into its engines through."""
    documented: bool = field(default=False, kw_only=True)
    """Whether it is part of the documented ladder, the recipe that people follow by hand."""
    keeps_gradients: bool = field(default=False, kw_only=True)
    """Its engines have memory for accumulated gradients whether they accumulate or not."""

    @property
    def devices(self) -> frozenset[Place]:
        return frozenset({self.offload_optimizer, self.offload_param}) - {"none"}

    @property
    def states_on_gpu(self) -> bool:
        """Whether the optimizer's states are divided and stay on the GPU."""
        return self.stage > 0 and self.offload_optimizer == "none"
