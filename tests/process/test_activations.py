"""What the forward pass keeps for backward: the formula beside what transformers' own modules save."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import make_candidate
from helpers.saved_bytes import FAMILIES, SEQ_LEN, block_of

from ladder.backends.activations import activations_of
from ladder.workload.lora import Lora
from ladder.workload.workload import Workload

MORE = {"gpt2": 0.04, "opt": 0.06}
"""And what it adds: the masks of dropout, which is off here, where they are as large as what they mask."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_keeps_what_the_formula_says(family: str) -> None:
    shape, saved = block_of(family)
    workload = Workload(model=shape, task="causal-lm", seq_len=SEQ_LEN, global_batch_size=2)
    candidate = replace(make_candidate("zero1", checkpointing=False), accumulation=1)
    predicted = activations_of(workload, candidate).kept / 4
    assert 0.97 < predicted / saved < 1.03 + MORE.get(family, 0.0)


NAMES = ("q_proj", "v_proj", "c_attn", "query_key_value")
ADAPTERS = {"all": Lora(rank=16), "attention": Lora(rank=16, targets=NAMES)}
MORE_WITH_ADAPTERS = {"gpt2": 0.05, "opt": 0.06, "gpt_neox": 0.06}
"""The masks again, of less; GPT-NeoX, whose two branches read one input, when only one of them has adapters."""


def predicted(family: str, lora: Lora, tokens: int = SEQ_LEN) -> tuple[float, float]:
    """Bytes that a frozen block with adapters saves for a sequence of `tokens`: by the formula, and counted."""
    shape, saved = block_of(family, lora, tokens)
    workload = Workload(model=shape, task="causal-lm", seq_len=tokens, global_batch_size=2, lora=lora)
    candidate = replace(make_candidate("zero1", checkpointing=False), accumulation=1)
    return activations_of(workload, candidate).kept / 4, saved


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_block_with_adapters_keeps_what_the_formula_says(family: str, kind: str) -> None:
    formula, saved = predicted(family, ADAPTERS[kind])
    assert 0.97 < formula / saved < 1.03 + MORE_WITH_ADAPTERS.get(family, 0.0)


# What is added by more tokens: DoRA also makes tensors of the size of the weights, which are not kept.
@pytest.mark.parametrize(("lora", "on_cpu"), [(Lora(dropout=0.1), 2560), (Lora(dora=True), 0)], ids=["dropout", "dora"])
def test_dropout_and_dora_keep_what_the_formula_says_for_every_token(lora: Lora, on_cpu: int) -> None:
    formula, saved = predicted("llama", lora, 512)
    fewer, saved_of_fewer = predicted("llama", lora, 256)
    # On the CPU the mask of dropout takes two bytes an input instead of one.
    assert formula - fewer + 256 * on_cpu == pytest.approx(saved - saved_of_fewer, rel=0.02)
