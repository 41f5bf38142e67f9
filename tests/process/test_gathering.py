"""What the simulator says stage 3 has gathered at most, beside DeepSpeed itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import rank_alone

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.simulation.gathering import gathering_of
from ladder.simulation.kinds import assignment_of
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


@pytest.mark.parametrize(
    ("ahead", "reuse", "cap", "checkpoint_every"),
    [(0, 0, 1_000_000, 0), (300_000, 1_000_000, 2_000_000, 1), (300_000, 3_000_000, 3_000_000, 0)],
    ids=["one at a time", "checkpointing", "half of the model"],
)
def test_as_much_is_gathered_as_deepspeed_gathers(ahead: int, reuse: int, cap: int, checkpoint_every: int) -> None:
    zero = {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500_000,
        "stage3_prefetch_bucket_size": ahead,
        "stage3_max_reuse_distance": reuse,
        "stage3_max_live_parameters": cap,
        "stage3_param_persistence_threshold": 2560,
    }
    script = Path(__file__).with_name("live_parameters.py")
    ran = subprocess.run(
        [sys.executable, str(script), json.dumps(SMALL), json.dumps(zero), str(checkpoint_every)],
        env=rank_alone(),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    live = int(ran.stdout.split("live ")[1])

    shape = shape_from_config({"model_type": "llama", **SMALL}, name="small", source="file")
    workload = Workload(model=shape, task="causal-lm", seq_len=64, global_batch_size=2)
    engine = Engine(RUNGS_BY_NAME["zero3"], tuple(sorted(zero.items())))
    gathering = gathering_of(assignment_of(workload, Candidate(engine, checkpoint_every, 1, 1), 2))
    # What is on its way is there twice for a moment, which DeepSpeed's own count leaves out; its last parameter may be
    # one more than was asked for.
    assert live <= max(gathering.live) <= live + ahead + shape.largest_parameter
