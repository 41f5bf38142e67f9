"""A workload's fingerprint follows the training and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helpers.scripts import make_script

from ladder.workload.lora import Lora
from ladder.workload.script import Generation
from ladder.workload.shapes import with_layers
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

CHANGES: list[dict[str, Any]] = [
    {"task": "masked-lm"},
    {"seq_len": 128},
    {"global_batch_size": 32},
    {"dtype": "fp16"},
    {"optimizer": "sgd"},
    {"gradient_clipping": 0.5},
    {"model": with_layers(resolve_model("tiny-llama"), 2)},
    {"lora": Lora(rank=16)},
    {"lora": Lora(rank=8)},
    {"lora": Lora(rank=8), "load_in": "4bit"},
    {"lora": Lora(rank=8), "load_in": "4bit", "prepare_kbit": True},
    {"freeze": ("model.layers.0",)},
    {"script": make_script()},
    {"script": make_script("train.py", "--learning_rate", "1e-3")},
    {"script": make_script(kind="accelerate")},
    {"script": make_script(digest="60" * 32)},
    {"script": make_script(num_parameters=1_000_001)},
    {"script": make_script(num_samples=999)},
    {"script": make_script(rows=2)},
    {"script": make_script(generation=Generation(batch=None, micro_steps=None, per_prompt=4, longest=256))},
    {"script": make_script(generation=Generation(batch=None, micro_steps=None, per_prompt=4, longest=512))},
]


def test_the_fingerprint_changes_with_anything_that_changes_the_training_and_with_nothing_else() -> None:
    usual = Workload(model=resolve_model("tiny-llama"), task="causal-lm", seq_len=64, global_batch_size=8)
    prints = {usual.fingerprint(), *(replace(usual, **change).fingerprint() for change in CHANGES)}
    assert len(prints) == 1 + len(CHANGES)
    model = replace(usual.model, name="/data/tiny", source="folder", note="moved")
    reordered = dict(reversed(list(usual.model.config.items())))
    assert replace(usual, model=replace(model, config=reordered)).fingerprint() == usual.fingerprint()
    script = replace(usual, script=make_script())
    slower = make_script(preparation_seconds=9.0, modules=("trl",), path="/elsewhere/train.py")
    assert replace(script, script=slower).fingerprint() == script.fingerprint()
