"""What transformers' own code was counted to do in a block takes the place of formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import make_candidate
from helpers.shapes import llama_like

from ladder.backends.activations import activations_of, terms_of
from ladder.backends.timing import token_seconds
from ladder.machine.machine_speed import machine_speed
from ladder.workload.lora import Lora
from ladder.workload.workload import CountedBlock, Workload

SEQ_LEN = 256
BLOCK = CountedBlock(
    kept=20000.0,
    kept_by_length=4.0,
    kept_for_weights=6000.0,
    moved=70000.0,
    moved_by_length=8.0,
    kernels=107.0,
    tensors=7.5,
)


def workload(block: CountedBlock | None = BLOCK, lora: Lora | None = None) -> Workload:
    usual = llama_like(4, hidden=256, intermediate=512, heads=4, seq_len=SEQ_LEN, lora=lora)
    return replace(usual, model=replace(usual.model, block=block))


CANDIDATE = make_candidate("zero0", checkpointing=False, micro_batch=2)


def test_a_block_keeps_and_moves_what_was_counted_for_its_length() -> None:
    tokens = 2 * SEQ_LEN
    assert activations_of(workload(), CANDIDATE).kept == pytest.approx(4 * tokens * (20000 + 4 * SEQ_LEN))
    assert terms_of(workload(), CANDIDATE, 1).traffic == pytest.approx(70000 + 8 * SEQ_LEN)
    assert workload().tensors_of_a_block == 7.5


def test_checkpointing_keeps_inputs_however_much_a_block_would_keep() -> None:
    on = make_candidate("zero0", checkpointing=True, micro_batch=2)
    assert activations_of(workload(), on).kept == activations_of(workload(None), on).kept
    assert activations_of(workload(), on).block > activations_of(workload(None), on).block


def test_a_block_with_as_many_kernels_as_a_llama_block_is_launched_as_fast() -> None:
    assert terms_of(workload(), CANDIDATE, 1).launches == pytest.approx(1.0, rel=0.01)
    twice = replace(BLOCK, kernels=2 * BLOCK.kernels)
    assert terms_of(workload(twice), CANDIDATE, 1).launches == pytest.approx(1.5, rel=0.02)


def test_a_frozen_block_keeps_what_its_weights_do_not_need_and_what_adapters_do() -> None:
    tokens, per_token = 2 * SEQ_LEN, 20000 + 4 * SEQ_LEN - 6000
    queries = Lora(rank=8, targets=("q_proj",))
    needed = 2 * 256 + 2 * 8
    assert activations_of(workload(lora=queries), CANDIDATE).kept == pytest.approx(4 * tokens * (per_token + needed))
    everything = 2 * (256 + 256 + 512) + 7 * 2 * 8
    assert activations_of(workload(lora=Lora(rank=8)), CANDIDATE).kept == pytest.approx(
        4 * tokens * (per_token + everything)
    )


def test_products_in_32_bits_and_attention_with_a_mask_make_a_token_take_longer() -> None:
    machine = machine_speed("NVIDIA H200", "cuda", 1, 16)

    def seconds(block: CountedBlock) -> float:
        return token_seconds(workload(block), CANDIDATE, machine, terms_of(workload(block), CANDIDATE, 1))

    exact = replace(BLOCK, flops_32=1e6, flops_32_by_length=1e3)
    more = 4 * (1e6 + 1e3 * SEQ_LEN) * (1 / 67e12 - 1 / 989e12) / 0.65
    assert seconds(exact) - seconds(BLOCK) == pytest.approx(more)
    of_attention = 4 * 6 * 256 * SEQ_LEN / (989e12 * 0.65)
    assert seconds(replace(BLOCK, masked=256.0)) - seconds(BLOCK) == pytest.approx(5 * of_attention)
