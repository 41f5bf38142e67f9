"""FSDP2's settings in the words of accelerate's file and of the Trainer."""

from __future__ import annotations

from typing import Any

from ladder.backends.plain.config import one_rank_loads
from ladder.emit.settings import Settings


def sharding(settings: Settings, offload: str) -> dict[str, Any]:
    """FSDP2's settings; accelerate and the Trainer have other words for `offload`."""
    return {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": settings.stage == 3,
        offload: settings.rung.offload_param == "cpu",
        "state_dict_type": "FULL_STATE_DICT",
        "cpu_ram_efficient_loading": one_rank_loads(settings.load_in, settings.techniques),
    }
