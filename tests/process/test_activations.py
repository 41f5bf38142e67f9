"""What the forward pass keeps for backward: the formula beside what transformers' own modules save."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import make_candidate
from helpers.saved_bytes import FAMILIES, SEQ_LEN, block_of

from ladder.backends.activations import activations_of
from ladder.workload.workload import Workload

FEWER = {"mixtral": 0.12, "gemma": 0.08}
"""The share that the formula leaves out: what routes tokens to experts, Gemma's weights as 1 + w."""
MORE = {"opt": 0.06}
"""And what it adds: the masks of dropout, which is off here, where they are as large as what they mask."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_keeps_what_the_formula_says(family: str) -> None:
    shape, saved = block_of(family)
    workload = Workload(model=shape, task="causal-lm", seq_len=SEQ_LEN, global_batch_size=2)
    candidate = replace(make_candidate("zero1", checkpointing=False), accumulation=1)
    predicted = activations_of(workload, candidate).kept / 4
    assert 0.97 - FEWER.get(family, 0.0) < predicted / saved < 1.03 + MORE.get(family, 0.0)
