"""Random weights for the host, drawn on another device, beside what transformers draws there itself."""

from __future__ import annotations

import pytest
import torch
from helpers import TINY_CONFIG

from ladder.machine.gpus import visible_gpus
from ladder.trial import model as trial_model
from ladder.trial.model import DrawnOn
from ladder.trial.model_class import auto_class, model_config


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not visible_gpus(), reason="needs a CUDA GPU"))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_drawn_elsewhere_spread_as_the_family_says(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_model, "_DRAWN_AT_ONCE", 1000)  # so that each matrix takes several pieces
    config = model_config(TINY_CONFIG)
    with torch.device("cpu"), DrawnOn(device):
        model = auto_class(config, "causal-lm").from_config(config, dtype=dtype)
    for name, weights in model.named_parameters():
        assert (weights.device.type, weights.dtype) == ("cpu", dtype)
        if weights.dim() == 1:
            assert (weights == 1).all(), name
            continue
        numbers = weights.detach().float().flatten()
        first, last = numbers[:1000], numbers[-1000:]
        for part in (first, last):
            assert part.std().item() == pytest.approx(config.initializer_range, rel=0.15), name
            assert abs(part.mean().item()) < 0.1 * config.initializer_range + 0.001, name
        assert not torch.equal(first, last), name
