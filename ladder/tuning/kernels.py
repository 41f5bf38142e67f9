"""Liger's kernels: whether this model can run on them here. https://github.com/linkedin/Liger-Kernel"""

from __future__ import annotations

import importlib.util

from ladder.errors import EnvironmentFaultError, UsageError
from ladder.workload import LIGER_FAMILIES, Workload


def require_liger(workload: Workload, device: str, *, on_paper: bool = False) -> None:
    """UsageError where Liger's kernels cannot train `workload` on `device`, EnvironmentFaultError where they lack."""
    model_type = workload.model.model_type
    if not workload.has_liger:
        raise UsageError(
            f"Liger's kernels are tried with {', '.join(LIGER_FAMILIES)} for causal-lm, not with {model_type} for "
            f"{workload.task}; leave --liger out."
        )
    if device == "cpu":
        raise UsageError("Liger's kernels need a GPU; leave --liger out.")
    if not on_paper and importlib.util.find_spec("liger_kernel") is None:
        raise EnvironmentFaultError("liger-kernel is not installed; `pip install 'ladder[liger]'`.")
