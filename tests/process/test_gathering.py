"""What the walk through a step says stage 3 has gathered at most, beside DeepSpeed itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import rank_alone

from ladder.backends.registry import MAIN, RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.workload.shapes import shape_from_config
from ladder.workload.workload import Workload

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
    "use_cache": False,
}


CASES = {
    "one at a time": (0, 0, 1_000_000, 0),
    "checkpointing": (300_000, 1_000_000, 2_000_000, 1),
    "half of the model": (300_000, 3_000_000, 3_000_000, 0),
}


def settings(ahead: int, reuse: int, cap: int) -> dict[str, Any]:
    return {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500_000,
        "stage3_prefetch_bucket_size": ahead,
        "stage3_max_reuse_distance": reuse,
        "stage3_max_live_parameters": cap,
        "stage3_param_persistence_threshold": 2560,
    }


@pytest.fixture(scope="module")
def gathered() -> dict[str, int]:
    """The most elements that DeepSpeed gathers, by case."""
    script = Path(__file__).with_name("live_parameters.py")
    cases = [(settings(*case[:3]), case[3]) for case in CASES.values()]
    command = [sys.executable, str(script), json.dumps(SMALL), json.dumps(cases)]
    ran = subprocess.run(command, env=rank_alone(), capture_output=True, text=True, timeout=200, check=True)
    return dict(zip(CASES, json.loads(ran.stdout.split("live ")[1]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_as_much_is_gathered_as_deepspeed_gathers(case: str, gathered: dict[str, int]) -> None:
    ahead, *_, checkpoint_every = CASES[case]
    zero = settings(*CASES[case][:3])
    shape = shape_from_config({"model_type": "llama", **SMALL}, name="small", source="file")
    workload = Workload(model=shape, task="causal-lm", seq_len=64, global_batch_size=2)
    engine = Engine(RUNGS_BY_NAME["zero3"], tuple(sorted(zero.items())))
    gathering = MAIN.assignment(workload, Candidate(engine, checkpoint_every, 1, 1), 2).gathering
    # What is on its way is there twice for a moment, which DeepSpeed's own count leaves out; its last parameter may be
    # one more than was asked for.
    assert gathered[case] <= max(gathering.live) <= gathered[case] + ahead + shape.largest_parameter
