"""What the forward pass keeps for backward, beside what transformers' own modules save."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import make_candidate
from helpers.saved_bytes import FAMILIES, SEQ_LEN, block_of

from ladder.backends.registry import backend_of
from ladder.workload.lora import Lora
from ladder.workload.workload import Workload

NAMES = ("q_proj", "v_proj", "c_attn", "query_key_value")
ADAPTERS = {"none": None, "all": Lora(rank=16), "attention": Lora(rank=16, targets=NAMES)}
MORE = {"gpt2": 0.06, "opt": 0.07}
"""The masks of dropout, which is off in the modules compared with, where they are as large as what they mask."""
MORE_BESIDE_ADAPTERS = {"gpt_neox": 0.06}
"""GPT-NeoX's two branches read one input, when only one of them has adapters."""


def of_the_last_block(workload: Workload, rung: str) -> float:
    candidate = replace(make_candidate(rung, checkpointing=False), accumulation=1)
    step = backend_of(candidate.engine.rung).assignment(workload, candidate, 1)
    operations = step.network.blocks[-1].operations
    fixed = sum(each.fixed + 2.0 * each.casts for each in operations)
    return workload.seq_len * sum(each.saves for each in operations) + fixed


def saved(family: str, lora: Lora | None, tokens: int = SEQ_LEN, rung: str = "zero1") -> tuple[float, float]:
    """Bytes that a block saves for a sequence of `tokens`: as predicted, and counted."""
    shape, counted = block_of(family, lora, tokens, autocast=rung == "ddp")
    workload = Workload(model=shape, task="causal-lm", seq_len=tokens, global_batch_size=2, lora=lora)
    return of_the_last_block(workload, rung), counted


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_keeps_what_its_operations_say(family: str, kind: str) -> None:
    predicted, counted = saved(family, ADAPTERS[kind])
    more = MORE if kind == "none" else MORE | MORE_BESIDE_ADAPTERS
    assert 0.96 < predicted / counted < 1.03 + more.get(family, 0.0)


@pytest.mark.parametrize("lora", [None, Lora(rank=16)], ids=["whole", "adapters"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])  # not GPT-2, whose powers a CPU's autocast leaves narrow
def test_the_operations_of_a_block_under_autocast_save_what_its_modules_save(family: str, lora: Lora | None) -> None:
    predicted, counted = saved(family, lora, rung="ddp")
    assert 0.97 < predicted / counted < 1.03 + MORE.get(family, 0.0)


# What is added by more tokens: DoRA also makes tensors of the size of the weights, which are not kept.
@pytest.mark.parametrize(("lora", "on_cpu"), [(Lora(dropout=0.1), 2560), (Lora(dora=True), 0)], ids=["dropout", "dora"])
def test_dropout_and_dora_keep_for_every_token_what_is_predicted(lora: Lora, on_cpu: int) -> None:
    (more, counted), (fewer, counted_of_fewer) = saved("llama", lora, 512), saved("llama", lora, 256)
    # On the CPU the mask of dropout takes two bytes an input instead of one.
    assert more - fewer + 256 * on_cpu == pytest.approx(counted - counted_of_fewer, rel=0.02)
