"""Mixtures of experts at stage 3, where all ranks must gather the same weights though each token picks its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import Bench, tiny_trial

from ladder.events.protocol import FailedEvent, MeasuredEvent

SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 512, "num_experts_per_tok": 1}
MIXTURES: list[dict[str, Any]] = [
    {"model_type": "mixtral", "num_local_experts": 4, **SMALL},  # which DeepSpeed knows, so that it is a leaf
    {"model_type": "olmoe", "num_experts": 8, **SMALL},  # which it does not
]


@pytest.mark.parametrize("config", MIXTURES, ids=lambda config: config["model_type"])
def test_a_mixture_is_proven_at_stage_3_on_ranks_whose_tokens_pick_other_experts(
    warm_bench: Bench, tmp_path: Path, config: dict[str, Any]
) -> None:
    spec = tiny_trial(tmp_path / "0001", 1, rung="zero3", proof=True)
    run = warm_bench.run(spec.model_copy(update={"model_config_json": config}))
    failed = [event for events in run.events for event in events if isinstance(event, FailedEvent)]
    assert not failed, failed[0].traceback
    assert all(any(isinstance(event, MeasuredEvent) for event in events) for events in run.events)
