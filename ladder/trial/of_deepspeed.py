"""What ranks take from DeepSpeed whatever their engine, where it is installed: without it, DDP and FSDP2 train."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any


@functools.cache
def is_installed() -> bool:
    found = find_spec("deepspeed")
    return found is not None and found.origin is not None  # a folder of that name is none


def engine_methods(*names: str) -> list[tuple[Any, str]]:
    """Its engine's class with each of `names`, to be wrapped; nothing where it is not installed."""
    if not is_installed():
        return []
    import deepspeed

    return [(deepspeed.DeepSpeedEngine, name) for name in names]
