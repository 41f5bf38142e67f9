"""The default precision: bf16, or fp16 on GPUs without bf16."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from ladder.errors import UsageError
from ladder.workload.workload import Dtype

if TYPE_CHECKING:
    from ladder.machine.described import Machine

_FIRST_WITH_BF16 = 8
"""Major compute capability: Ampere, 2020 (defined by its data sheet)."""
# Names of older GPUs, for machines on paper and for drivers that do not report the capability.
_WITHOUT_BF16 = re.compile(
    r"\b(V100\w*|T4|P100|P40|P4|M40|M60|K40\w*|K80|GTX|TITAN|RTX 20[678]0|Quadro (GP|GV|RTX|P|M)\w*)\b"
)


def dtype_of(asked: Dtype | None, machine: Machine, note: Callable[[str], None]) -> Dtype:
    """The precision that was `asked` for, otherwise the best that the GPU has; `note` gets a sentence if it is fp16.

    UsageError if bf16 is asked for and the GPU does not have it.
    """
    name = machine.gpu_name
    if name is None or asked in ("fp16", "fp32") or _has_bf16(machine, name):
        return asked or "bf16"
    if asked == "bf16":
        raise UsageError(f"--dtype bf16: {name} has no bf16; use --dtype fp16.")
    note(f"{name} has no bf16, so training is in fp16 (--dtype).")
    return "fp16"


def _has_bf16(machine: Machine, name: str) -> bool:
    """As the driver says of the least capable GPU, and by its name where the driver does not say it."""
    import pynvml

    try:
        handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in machine.gpus]
        return min(int(pynvml.nvmlDeviceGetCudaComputeCapability(each)[0]) for each in handles) >= _FIRST_WITH_BF16
    except pynvml.NVMLError:  # also for machines on paper, as NVML is not initialised then
        return _WITHOUT_BF16.search(name) is None
