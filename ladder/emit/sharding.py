"""FSDP2's settings in the words of accelerate's file and of the Trainer."""

from __future__ import annotations

from typing import Any

from ladder.emit.settings import Settings


def sharding(settings: Settings, offload: str) -> dict[str, Any]:
    """FSDP2's settings; accelerate and the Trainer have other words for `offload`."""
    return {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": settings.stage == 3,
        offload: settings.rung.offload_param == "cpu",
        "state_dict_type": "FULL_STATE_DICT",
        # With it only rank 0 loads the weights; accelerate sends neither packed nor changed ones to the others.
        "cpu_ram_efficient_loading": settings.load_in is None
        and not any(technique.loads_on_all_ranks for technique in settings.techniques),
    }
