"""The operations that the simulator walks through, beside what transformers' own modules save for backward."""

from __future__ import annotations

import pytest
from helpers import make_candidate
from helpers.saved_bytes import FAMILIES, SEQ_LEN, block_of

from ladder.simulation.assignment import Assignment
from ladder.workload.workload import Workload

LEFT_OUT = {"mixtral": 0.12, "gemma": 0.08, "gpt_neox": 0.05}
"""What routes tokens to experts, Gemma's weights as 1 + w, and GPT-NeoX's rotary halves."""
TOO_MUCH = {"opt": 0.06, "gpt2": 0.06, "gpt_neox": 0.06}
"""The masks of dropout, which is off in the modules compared with."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_operations_of_a_block_save_what_its_modules_save(family: str) -> None:
    shape, measured = block_of(family)
    workload = Workload(model=shape, task="causal-lm", seq_len=SEQ_LEN, global_batch_size=2)
    assignment = Assignment(workload, make_candidate("zero1", checkpointing=False), 1)
    said = SEQ_LEN * sum(operation.saves for operation in assignment.network.block)
    assert 0.97 - LEFT_OUT.get(family, 0.0) < said / measured < 1.03 + TOO_MUCH.get(family, 0.0)
