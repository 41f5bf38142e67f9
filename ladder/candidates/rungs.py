"""The rungs: the documented ladder, and the steps beyond it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["none", "cpu", "nvme"]
Knob = tuple[str, bool | int]

# Step 7 of the documented ladder: what DeepSpeed's defaults spend on speed, given back. Upper bounds, in elements.
LEAN_KNOBS: tuple[Knob, ...] = (
    ("reduce_bucket_size", 10_000_000),
    ("stage3_max_live_parameters", 100_000_000),
    ("stage3_max_reuse_distance", 100_000_000),
    ("stage3_prefetch_bucket_size", 10_000_000),
    ("sub_group_size", 100_000_000),
)

# DeepSpeed holds one NVMe buffer for each parameter that stays on the GPU for its next use or is fetched ahead of it,
# and asserts when none is left. What it fetches ahead goes astray as soon as the order of the modules changes: when
# gradient checkpointing is switched, or an evaluation comes between steps. So none may stay, and none comes early
# (measured on a CPU: steps take 12 to 18 % longer, and never fail).
_ONE_AT_A_TIME: tuple[Knob, ...] = (("stage3_max_reuse_distance", 0), ("stage3_prefetch_bucket_size", 0))


@dataclass(frozen=True)
class Rung:
    """A step of the documented ladder: a ZeRO stage and where optimizer and parameters live."""

    name: str
    stage: int
    offload_optimizer: Device = "none"
    offload_param: Device = "none"
    knobs: tuple[Knob, ...] = ()
    backend: str = "deepspeed"
    """Who trains its engines."""
    documented: bool = True
    """Part of the recipe that is walked by hand; the others lie beyond it."""

    @property
    def devices(self) -> frozenset[Device]:
        return frozenset({self.offload_optimizer, self.offload_param}) - {"none"}

    @property
    def states_on_gpu(self) -> bool:
        """Whether ZeRO keeps optimizer states of its own, and on the GPU."""
        return self.stage > 0 and self.offload_optimizer == "none"

    @property
    def family(self) -> str:
        """The same for rungs that differ in knobs only: the same stage, the same devices."""
        return f"{self.stage} {self.offload_optimizer} {self.offload_param}"


# In the documented order: fastest claimed first, most frugal last.
RUNGS: tuple[Rung, ...] = (
    Rung("zero0", 0),
    Rung("zero1", 1),
    Rung("zero2", 2),
    # Gradients stay on the GPU until the boundary: they cross the bus once a step, not once a micro-step.
    Rung("zero1+opt-cpu", 1, "cpu", documented=False),
    Rung("zero2+opt-cpu", 2, "cpu"),
    Rung("zero3", 3),
    Rung("zero3+opt-cpu", 3, "cpu"),
    Rung("zero3+param-cpu", 3, "none", "cpu"),
    Rung("zero3+param-cpu+opt-cpu", 3, "cpu", "cpu"),
    Rung("zero3+param-cpu+opt-cpu+lean", 3, "cpu", "cpu", LEAN_KNOBS),
    Rung("zero3+opt-nvme", 3, "nvme"),
    Rung("zero3+param-nvme+opt-nvme", 3, "nvme", "nvme", _ONE_AT_A_TIME),
)
RUNGS_BY_NAME = {rung.name: rung for rung in RUNGS}
