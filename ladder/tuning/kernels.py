"""Libraries that a tune can do without: whether they are here, and can train this model.

https://github.com/linkedin/Liger-Kernel, https://github.com/bitsandbytes-foundation/bitsandbytes
"""

from __future__ import annotations

import importlib.util

from ladder.candidates import ADAM_8BIT, Engine
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.workload.workload import LIGER_FAMILIES, Workload

_LARGE_VOCABULARY = 100_000


def tries_liger(asked: bool | None, workload: Workload, device: str, *, on_paper: bool = False) -> bool:
    """Whether a tune tries Liger's kernels: as asked, and unasked where they are here. Raises as `require_liger`."""
    if asked:
        require_liger(workload, device, on_paper=on_paper)
    return asked if asked is not None else workload.has_liger and device == "cuda" and not on_paper and _installed()


def about_liger(asked: bool | None, workload: Workload, device: str) -> str:
    """A sentence on what a tune does that was not asked for, or could do; empty where there is nothing to say."""
    if asked is not None or device == "cpu" or not workload.has_liger:
        return ""
    if _installed():
        return "Each rung is tried on Liger's kernels too, which are installed; --no-liger leaves them out."
    if workload.model.vocab_size < _LARGE_VOCABULARY:
        return ""
    return (
        f"With {workload.model.vocab_size:,} tokens, rungs on Liger's kernels, which keep no logits, may be far "
        "faster: `pip install liger-kernel`, and they are tried."
    )


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
    if not on_paper and not _installed():
        raise EnvironmentFaultError("liger-kernel is not installed; `pip install liger-kernel`.")


def require_bitsandbytes() -> None:
    """EnvironmentFaultError where Adam's moments of 8 bits lack."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise EnvironmentFaultError("bitsandbytes is not installed; `pip install bitsandbytes`.")


def libraries_of(engine: Engine) -> list[str]:
    """Those that `engine` runs on. No history depends on them: what ran without them is as good as before."""
    is_used = {"liger-kernel": engine.liger, "bitsandbytes": engine.numerics == ADAM_8BIT}
    return [name for name, used in is_used.items() if used]


def _installed() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None
