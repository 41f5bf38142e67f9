"""Which rungs can train with other numerics, for which workload."""

from __future__ import annotations

from ladder.candidates import ADAM_8BIT, BF16_STATES, Rung
from ladder.workload.workload import Workload

ELEMENTS_8BIT = 1 << 31
"""Of a tensor that bitsandbytes 0.50 updates there are fewer: its kernels count in 32 bits, and wrap silently."""


def numerics_of(rung: Rung, workload: Workload, world_size: int, device: str) -> list[str]:
    """Those of `NUMERICS` that `rung` can have.

    DeepSpeed takes optimizer states in bf16 from stage 1 on; on the host it would want them of an optimizer that
    neither the Trainer nor accelerate makes. Stages 1 and 2 update a rank's share of the parameters as one tensor,
    which can be too long for moments in 8 bits; stage 3 does it in pieces. On the CPU bitsandbytes computes with whole
    copies in fp32, and takes more memory than usual moments.
    """
    if not rung.states_on_gpu:
        return []
    short = rung.stage == 3 or -(-workload.model.num_parameters // world_size) < ELEMENTS_8BIT
    can = {
        BF16_STATES: workload.dtype == "bf16",
        ADAM_8BIT: workload.optimizer != "sgd" and device == "cuda" and short,
    }
    return [name for name, possible in can.items() if possible]
