"""The time of a step: the seconds of its parts, and how these overlap.

An engine's `Assignment.time_on` a machine says what each part takes; every part belongs to one unknown of the search.
`micro_step` lets them pass on three streams: kernels, what brings parameters to them, and the host that launches both.
The search scales the parts by what it believes of the unknowns, a simulated machine by what is true of it.
benchmarks/physics.py and benchmarks/prior.py compare the result with what was recorded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_BACKWARD = 2 / 3
"""The share of computing that is backward, beside which gradients are reduced. Derived: two of three products."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Seconds of the parts of a candidate's step on one rank, each as if it were alone."""

    compute: float
    ramp: float = 0.0
    """Additional compute because kernels do not fill the GPU at their start and end; the same for any micro-batch."""
    launch: float
    """Host work to launch the kernels and for hooks, which is the least time of a micro-step with any batch."""
    reduce: float = 0.0
    """Reduction of gradients and copying them to the host, in every micro-step."""
    hidden: float = 0.0
    """The share of `reduce` that overlaps with backward."""
    handling: float = 0.0
    """Casting and copying weights, adding up gradients: work of the GPU in every micro-step, with any batch."""
    gather: float = 0.0
    """The transfers that gather parameters."""
    exchange: float = 0.0
    """Exchanges between ranks in forward and backward, besides gradients and parameters."""
    inputs: float = 0.0
    """Copying offloaded inputs of layers to the host in forward and back in backward, for which kernels wait."""
    update: float
    """Work of the last micro-step only: the optimizer, reduction at stages 0 and 1, copying parameters back."""


def micro_step(
    *, compute: float, reduce: float, hidden: float, beside: float, gather: float, launch: float, overlaps: bool = True
) -> float:
    """Seconds of a micro-step without the optimizer, whose parts take so long.

    `beside` is all else that kernels wait for; `compute` includes the ramp. A machine that does not overlap does
    everything one after the other.
    """
    if not overlaps:
        return compute + reduce + beside + gather + launch
    busy = compute + reduce - hidden * min(reduce, compute * _BACKWARD) + beside
    return _soft_maximum(busy, gather, launch)


def _soft_maximum(*seconds: float) -> float:
    """The maximum, and a little more if others are nearly as long, because overlap is never perfect."""
    longest = max(seconds)
    return longest * math.sqrt(math.sqrt(math.fsum((value / longest) ** 4 for value in seconds)))
