"""Quantised weights as a rank makes them on a GPU, where bitsandbytes packs in other ways than on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TINY_CONFIG, tiny_trial

from ladder.machine.gpus import visible_gpus
from ladder.trial.model_class import auto_class, model_config
from ladder.trial.quantised import quantised_model
from ladder.workload.trained import LoadIn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not visible_gpus(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(("load_in", "of_an_element"), [("4bit", 0.6), ("8bit", 1.1)])
def test_weights_are_packed_before_the_first_forward_pass(
    tmp_path: Path, load_in: LoadIn, of_an_element: float
) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    spec = replace(tiny_trial(tmp_path, 1, rung="zero0"), load_in=load_in, device="cuda")
    config = model_config(TINY_CONFIG)
    model: Any = quantised_model(auto_class(config, "causal-lm"), config, spec, torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    held = layer.weight.untyped_storage().nbytes()
    assert held < of_an_element * layer.in_features * layer.out_features
    ids = torch.randint(4, 100, (2, 16), device="cuda")
    assert model(input_ids=ids, labels=ids).loss.isfinite()
