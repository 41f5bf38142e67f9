"""The operations that the simulator walks through, beside what transformers' own modules save for backward."""

from __future__ import annotations

import pytest
from helpers import make_candidate
from helpers.saved_bytes import FAMILIES, SEQ_LEN, block_of

from ladder.simulation.kinds import assignment_of
from ladder.workload.lora import Lora
from ladder.workload.workload import Workload

LEFT_OUT = {"gemma": 0.08, "gpt_neox": 0.05}
"""Gemma's weights as 1 + w, and GPT-NeoX's rotary halves."""
TOO_MUCH = {"opt": 0.06, "gpt2": 0.06, "gpt_neox": 0.06}
"""The masks of dropout, which is off in the modules compared with."""

NAMES = ("q_proj", "v_proj", "c_attn", "query_key_value")
ADAPTERS = {"all": Lora(rank=16), "attention": Lora(rank=16, targets=NAMES)}


def saved_by_a_block(
    family: str, lora: Lora | None = None, tokens: int = SEQ_LEN, rung: str = "zero1"
) -> tuple[float, float]:
    """Bytes of the last block: by its operations, and counted."""
    shape, measured = block_of(family, lora, tokens, autocast=rung == "ddp")
    workload = Workload(model=shape, task="causal-lm", seq_len=tokens, global_batch_size=2, lora=lora)
    assignment = assignment_of(workload, make_candidate(rung, checkpointing=False), 1)
    operations = assignment.network.blocks[-1].operations
    fixed = sum(each.fixed + 2.0 * each.casts for each in operations)
    return tokens * sum(each.saves for each in operations) + fixed, measured


@pytest.mark.parametrize("family", FAMILIES)
def test_the_operations_of_a_block_save_what_its_modules_save(family: str) -> None:
    said, measured = saved_by_a_block(family)
    assert 0.97 - LEFT_OUT.get(family, 0.0) < said / measured < 1.03 + TOO_MUCH.get(family, 0.0)


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_operations_of_a_frozen_block_with_adapters_save_what_its_modules_save(family: str, kind: str) -> None:
    said, measured = saved_by_a_block(family, ADAPTERS[kind])
    assert 0.97 - LEFT_OUT.get(family, 0.0) < said / measured < 1.03 + TOO_MUCH.get(family, 0.0)


@pytest.mark.parametrize("lora", [None, Lora(rank=16)], ids=["whole", "adapters"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt2"])
def test_the_operations_of_a_block_under_autocast_save_what_its_modules_save(family: str, lora: Lora | None) -> None:
    said, measured = saved_by_a_block(family, lora, rung="ddp")
    assert 0.97 < said / measured < 1.03 + TOO_MUCH.get(family, 0.0)


# What is added by more tokens: DoRA also makes tensors of the size of the weights, which are not kept.
@pytest.mark.parametrize(("lora", "on_cpu"), [(Lora(dropout=0.1), 2560), (Lora(dora=True), 0)], ids=["dropout", "dora"])
def test_the_operations_of_dropout_and_dora_save_what_peft_saves_for_every_token(lora: Lora, on_cpu: int) -> None:
    said, measured = saved_by_a_block("llama", lora, 512)
    fewer, measured_of_fewer = saved_by_a_block("llama", lora, 256)
    # On the CPU the mask of dropout takes two bytes an input instead of one.
    assert said - fewer + 256 * on_cpu == pytest.approx(measured - measured_of_fewer, rel=0.02)
