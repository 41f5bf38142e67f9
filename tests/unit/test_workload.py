"""A workload's fingerprint follows the training and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ladder.workload.shapes import with_layers
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload


def tiny_workload() -> Workload:
    return Workload(model=resolve_model("tiny-llama"), task="causal-lm", seq_len=64, global_batch_size=8)


@pytest.mark.parametrize(
    "change",
    [
        {"task": "masked-lm"},
        {"seq_len": 128},
        {"global_batch_size": 32},
        {"dtype": "fp16"},
        {"optimizer": "sgd"},
        {"gradient_clipping": 0.5},
        {"model": with_layers(resolve_model("tiny-llama"), 2)},
    ],
)
def test_the_fingerprint_changes_with_anything_that_changes_the_training(change: dict) -> None:
    assert replace(tiny_workload(), **change).fingerprint() != tiny_workload().fingerprint()


def test_the_fingerprint_does_not_depend_on_how_the_model_was_named() -> None:
    workload = tiny_workload()
    elsewhere = replace(workload, model=replace(workload.model, name="/data/tiny", source="folder", note="moved"))
    assert elsewhere.fingerprint() == workload.fingerprint()


def test_the_fingerprint_does_not_depend_on_the_order_of_keys_in_the_configuration() -> None:
    workload = tiny_workload()
    reordered = dict(reversed(list(workload.model.config.items())))
    assert replace(workload, model=replace(workload.model, config=reordered)).fingerprint() == workload.fingerprint()
