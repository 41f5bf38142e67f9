"""DeepSpeed's rungs: those of the documented ladder, and others beyond it."""

from __future__ import annotations

from typing import Any

from ladder.candidates import Knob, Rung, Through

NAME = "deepspeed"
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


def _rung(name: str, stage: int, *where: Any, documented: bool = True) -> Rung:
    """Stage 3 allocates gradients at the start."""
    open_to: frozenset[Through] = frozenset({"model", "configuration"})
    return Rung(name, stage, *where, backend=NAME, open_to=open_to, documented=documented, keeps_gradients=stage == 3)


# In the documented order: the one said to be fastest first, the one with the least memory last.
RUNGS: tuple[Rung, ...] = (
    _rung("zero0", 0),
    _rung("zero1", 1),
    _rung("zero2", 2),
    # Gradients stay on the GPU until the optimizer steps: they cross the bus once per step, not once per micro-step.
    _rung("zero1+opt-cpu", 1, "cpu", documented=False),
    _rung("zero2+opt-cpu", 2, "cpu"),
    _rung("zero3", 3),
    _rung("zero3+opt-cpu", 3, "cpu"),
    _rung("zero3+param-cpu", 3, "none", "cpu"),
    _rung("zero3+param-cpu+opt-cpu", 3, "cpu", "cpu"),
    _rung("zero3+param-cpu+opt-cpu+lean", 3, "cpu", "cpu", LEAN_KNOBS),
    _rung("zero3+opt-nvme", 3, "nvme"),
    _rung("zero3+param-nvme+opt-nvme", 3, "nvme", "nvme", _ONE_AT_A_TIME),
)
