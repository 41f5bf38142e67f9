"""What the forward pass keeps for backward, beside what transformers' own modules save.

Two know it: the formula that a search believes in, and the operations that the simulator walks through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers import make_candidate
from helpers.saved_bytes import FAMILIES, SEQ_LEN, block_of

from ladder.backends.activations import activations_of
from ladder.simulation.kinds import assignment_of
from ladder.workload.lora import Lora
from ladder.workload.workload import Workload

NAMES = ("q_proj", "v_proj", "c_attn", "query_key_value")
ADAPTERS = {"none": None, "all": Lora(rank=16), "attention": Lora(rank=16, targets=NAMES)}
LEFT_OUT = {"gemma": 0.08, "gpt_neox": 0.05, "qwen3_moe": 0.01}
"""Of the operations: Gemma's weights as 1 + w, and GPT-NeoX's rotary halves."""
MORE = {
    "formula": {"gpt2": 0.04, "opt": 0.07},
    "operations": {"opt": 0.07, "gpt2": 0.06, "gpt_neox": 0.06},
}
"""The masks of dropout, which is off in the modules compared with, where they are as large as what they mask."""
MORE_BESIDE_ADAPTERS = {"gpt2": 0.05, "gpt_neox": 0.06}
"""Of the formula: the masks of less, and GPT-NeoX's two branches read one input, when only one of them has adapters."""


def by_the_formula(workload: Workload, rung: str) -> float:
    candidate = replace(make_candidate(rung, checkpointing=False), accumulation=1)
    return activations_of(workload, candidate).kept / 4


def by_the_operations(workload: Workload, rung: str) -> float:
    assignment = assignment_of(workload, make_candidate(rung, checkpointing=False), 1)
    operations = assignment.network.blocks[-1].operations
    fixed = sum(each.fixed + 2.0 * each.casts for each in operations)
    return workload.seq_len * sum(each.saves for each in operations) + fixed


KNOWN: dict[str, Callable[[Workload, str], float]] = {"formula": by_the_formula, "operations": by_the_operations}


def saved(family: str, lora: Lora | None, tokens: int = SEQ_LEN, rung: str = "zero1") -> tuple[dict[str, float], float]:
    """Bytes that a block saves for a sequence of `tokens`: by whoever knows it, and counted."""
    shape, counted = block_of(family, lora, tokens, autocast=rung == "ddp")
    workload = Workload(model=shape, task="causal-lm", seq_len=tokens, global_batch_size=2, lora=lora)
    return {name: of_a_block(workload, rung) for name, of_a_block in KNOWN.items()}, counted


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_keeps_what_the_formula_and_the_operations_say(family: str, kind: str) -> None:
    known, counted = saved(family, ADAPTERS[kind])
    of_formula = MORE["formula"] if kind == "none" else MORE["formula"] | MORE_BESIDE_ADAPTERS
    assert 0.96 < known["formula"] / counted < 1.03 + of_formula.get(family, 0.0)
    least, most = 0.97 - LEFT_OUT.get(family, 0.0), 1.03 + MORE["operations"].get(family, 0.0)
    assert least < known["operations"] / counted < most


@pytest.mark.parametrize("lora", [None, Lora(rank=16)], ids=["whole", "adapters"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt2"])
def test_the_operations_of_a_block_under_autocast_save_what_its_modules_save(family: str, lora: Lora | None) -> None:
    known, counted = saved(family, lora, rung="ddp")
    assert 0.97 < known["operations"] / counted < 1.03 + MORE["operations"].get(family, 0.0)


# What is added by more tokens: DoRA also makes tensors of the size of the weights, which are not kept.
@pytest.mark.parametrize(("lora", "on_cpu"), [(Lora(dropout=0.1), 2560), (Lora(dora=True), 0)], ids=["dropout", "dora"])
def test_dropout_and_dora_keep_for_every_token_what_both_say(lora: Lora, on_cpu: int) -> None:
    (more, counted), (fewer, counted_of_fewer) = saved("llama", lora, 512), saved("llama", lora, 256)
    for name in KNOWN:
        # On the CPU the mask of dropout takes two bytes an input instead of one.
        assert more[name] - fewer[name] + 256 * on_cpu == pytest.approx(counted - counted_of_fewer, rel=0.02), name
