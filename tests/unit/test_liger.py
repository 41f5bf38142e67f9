"""Engines whose model runs on Liger's kernels: named, predicted, searched and emitted like the others."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
from helpers import bundled_workload, problem_for
from helpers.searches import space_of

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Engine
from ladder.options.technique_choices import TechniqueChoices, advice, techniques_tried
from ladder.search.remedies import remedies
from ladder.techniques.liger import LIGER
from ladder.units import GIB
from ladder.workload.workload import Workload

LARGE_VOCABULARY = bundled_workload("llama-3.2-1b", seq_len=1024, global_batch_size=32)


@pytest.mark.parametrize(
    ("installed", "asked", "workload", "device", "tries", "words"),
    [
        (True, None, LARGE_VOCABULARY, "cuda", True, "--no-liger leaves them out"),
        (True, False, LARGE_VOCABULARY, "cuda", False, ""),
        (True, None, LARGE_VOCABULARY, "cpu", False, ""),
        (True, None, bundled_workload("t0-3b", task="seq2seq-lm"), "cuda", False, ""),
        (False, None, LARGE_VOCABULARY, "cuda", False, "pip install liger-kernel"),
    ],
)
def test_it_is_tried_unasked_where_it_is_installed_and_a_sentence_says_so(
    installed: bool,
    asked: bool | None,
    workload: Workload,
    device: str,
    tries: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    consent = TechniqueChoices(switches={"liger": asked})
    assert (LIGER in techniques_tried(consent, workload, device, on_paper=False)) is tries
    said = "".join(advice(consent, problem_for(workload, device=device), [RUNGS_BY_NAME["zero2"]]))
    assert words in said
    assert bool(words) == bool(said)


def test_it_is_a_remedy_where_logits_are_too_many() -> None:
    workload, engines = bundled_workload("llama-3.1-8b", seq_len=32768), map(Engine, RUNGS_BY_NAME.values())
    space = space_of(*engines, workload=workload, memory_limit=40 * GIB, micro_batches=(1,), checkpointing=())
    assert LIGER in remedies(space).techniques
    assert "--liger" in remedies(space).sentence()
    assert LIGER not in remedies(replace(space, device="cpu")).techniques
    assert LIGER not in remedies(replace(space, workload=bundled_workload("opt-1.3b", seq_len=2048))).techniques


def test_a_mixture_keeps_less_of_its_experts_with_liger_s_kernels_than_with_its_own_code() -> None:
    model = bundled_workload("qwen3-30b-a3b").model
    own, with_liger = model.block, model.blocks_with["liger"]
    assert own is not None
    gates = 2 * 2 * model.intermediate_size * model.experts_of_a_token  # of 16 bits; what they read is one tensor
    assert gates < with_liger.kept < own.kept / 2
