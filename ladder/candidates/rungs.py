"""The rungs: those of the documented ladder, others beyond it, and those without DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["none", "cpu", "nvme"]
Knob = tuple[str, bool | int]

# Step 7 of the documented ladder: smaller buffers than DeepSpeed's defaults, slower but with less memory. In elements.
LEAN_KNOBS: tuple[Knob, ...] = (
    ("reduce_bucket_size", 10_000_000),
    ("stage3_max_live_parameters", 100_000_000),
    ("stage3_max_reuse_distance", 100_000_000),
    ("stage3_prefetch_bucket_size", 10_000_000),
    ("sub_group_size", 100_000_000),
)

# DeepSpeed needs an NVMe buffer for each parameter that it keeps on the GPU for reuse or prefetches, and fails with an
# assertion if no buffer is left. It prefetches the wrong parameters when the order of modules changes, as when gradient
# checkpointing is switched or an evaluation runs between steps. So both are off (measured on a CPU: steps take 12 to
# 18 % longer, and never fail).
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
    """The name of the backend that trains its engines."""
    documented: bool = True
    """Whether it is part of the documented ladder, the recipe that people follow by hand."""
    least_gpus: int = 0
    """The fewest GPUs on which it is tried; 0 if CPU ranks will do: accelerate ignores FSDP there."""

    @property
    def devices(self) -> frozenset[Device]:
        return frozenset({self.offload_optimizer, self.offload_param}) - {"none"}

    @property
    def states_on_gpu(self) -> bool:
        """Whether ZeRO manages the optimizer states and keeps them on the GPU."""
        return self.backend == "deepspeed" and self.stage > 0 and self.offload_optimizer == "none"

    @property
    def family(self) -> str:
        """The same for rungs that differ only in knobs."""
        of_backend = "" if self.backend == "deepspeed" else f"{self.backend} "
        return f"{of_backend}{self.stage} {self.offload_optimizer} {self.offload_param}"


# In the documented order: the one said to be fastest first, the one with the least memory last.
RUNGS: tuple[Rung, ...] = (
    Rung("zero0", 0),
    Rung("zero1", 1),
    Rung("zero2", 2),
    # Gradients stay on the GPU until the optimizer steps: they cross the bus once per step, not once per micro-step.
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
# Without DeepSpeed, through accelerate. `stage` is what each divides: nothing, gradients and optimizer states, or all.
PLAIN_RUNGS: tuple[Rung, ...] = (
    Rung("ddp", 0, backend="plain", documented=False),
    Rung("fsdp2+no-reshard", 2, backend="plain", documented=False, least_gpus=1),
    Rung("fsdp2", 3, backend="plain", documented=False, least_gpus=1),
    # Alone it promises no more than DeepSpeed's offload, with the same bytes over the same bus (simulated).
    Rung("fsdp2+cpu", 3, "cpu", "cpu", backend="plain", documented=False, least_gpus=2),
)
ALL_RUNGS = (*RUNGS, *PLAIN_RUNGS)
RUNGS_BY_NAME = {rung.name: rung for rung in ALL_RUNGS}
