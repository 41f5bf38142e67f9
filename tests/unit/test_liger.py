"""Engines whose model runs on Liger's kernels: named, predicted, searched and emitted like the others."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
from helpers import bundled_workload, make_candidate, problem_for
from helpers.searches import fitting, space_of

from ladder.backends.base import START
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.machine.machine_speed import machine_speed
from ladder.search.belief import believe
from ladder.search.memory import MemoryObservation, calibrate_memory, predict_memory
from ladder.search.remedies import remedies
from ladder.search.space import Space
from ladder.search.speed import predict_speed
from ladder.techniques.liger import LIGER
from ladder.tuning.technique_choices import TechniqueChoices, advice, techniques_tried
from ladder.units import GIB
from ladder.workload.workload import Workload

LARGE_VOCABULARY = bundled_workload("llama-3.2-1b", seq_len=1024, global_batch_size=32)


def on_liger(candidate: Candidate) -> Candidate:
    return replace(candidate, engine=candidate.engine.having(LIGER))


def peak(candidate: Candidate, workload: Workload = LARGE_VOCABULARY) -> int:
    return predict_memory(workload, candidate, world_size=1, device="cuda").peak


def test_what_is_learnt_of_an_engine_s_states_holds_on_either_kernels() -> None:
    candidate = make_candidate("zero2", micro_batch=1, accumulation=32)
    outside = int(1.4 * GIB)
    more = peak(candidate) + 2 * GIB
    seen = MemoryObservation(
        candidate=candidate, fits=True, peak_allocated=more - outside, peak_device=more, outside_torch=outside
    )
    known = calibrate_memory(LARGE_VOCABULARY, [seen], world_size=1, device="cuda")
    before, after = (
        predict_memory(LARGE_VOCABULARY, on_liger(candidate), world_size=1, device="cuda", calibration=calibration)
        for calibration in (None, known)
    )
    assert after.peak > before.peak + GIB // 2


def test_it_is_expected_to_be_faster_as_its_kernels_move_fewer_bytes() -> None:
    machine = machine_speed("NVIDIA H200", "cuda", 1, 16)
    candidate = make_candidate("zero2", micro_batch=16, accumulation=2)
    usual, fused = (
        predict_speed(LARGE_VOCABULARY, each, world_size=1, machine=machine)
        for each in (candidate, on_liger(candidate))
    )
    assert 1.2 < fused.tokens_per_second / usual.tokens_per_second < 1.6


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
    space = Space(
        workload=bundled_workload("llama-3.1-8b", seq_len=32768),
        world_size=1,
        device="cuda",
        memory_limit=40 * GIB,
        host_memory=1 << 60,
        engines=tuple(map(Engine, RUNGS_BY_NAME.values())),
        micro_batches=(1,),
    )
    assert LIGER in remedies(space).techniques
    assert "--liger" in remedies(space).sentence()
    assert LIGER not in remedies(replace(space, device="cpu")).techniques
    assert LIGER not in remedies(replace(space, workload=bundled_workload("opt-1.3b", seq_len=2048))).techniques


def test_where_an_engine_has_started_so_does_the_same_one_on_ligers_kernels() -> None:
    alone = Engine(RUNGS_BY_NAME["zero2+opt-cpu"])  # DeepSpeed copies a rank's 16-bit weights while it starts
    space = space_of(alone, alone.having(LIGER), micro_batches=(1,))
    first, other = (next(iter(space.of_engine(engine))) for engine in space.engines)
    assert START in believe(space, ()).outlook(other).memory.moments
    assert START not in believe(space, (fitting(space, first),)).outlook(other).memory.moments
