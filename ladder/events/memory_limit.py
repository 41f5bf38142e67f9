"""How a limit on the memory of a rank is shared between torch's allocator and what lies outside it, on a GPU."""

from __future__ import annotations

from ladder.units import MIB

_SLACK_FRACTION = 0.005
"""Of the limit, reserved for libraries that allocate a little more outside torch after the limit is set. Chosen: while
weights were gathered, NVML once showed 0.4 % more than torch's allocator and the context together (measured)."""
_SLACK_BYTES = 64 * MIB
"""The least slack. Chosen: as much as cuBLAS's workspace, for limits so small that the fraction is less."""


def slack(limit: int) -> int:
    """Bytes below `limit` that torch's allocator must leave free."""
    return max(_SLACK_BYTES, int(_SLACK_FRACTION * limit))


def for_torch(limit: int, outside: int, reserved: int) -> int:
    """Bytes for torch's allocator in a training whose proof took `outside` beside it, and `reserved` in it.

    At least as much as the proof's allocator held, as far as the limit has it: otherwise the training might not fit.
    """
    left = limit - outside
    return max(left - slack(limit), min(reserved, left))
