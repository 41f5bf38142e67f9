"""Engines whose model runs on Liger's kernels: named, predicted, searched and emitted like the others."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers import bundled_workload, make_candidate, problem_for
from helpers.answers import answer
from helpers.searches import fitting, space_of
from typer.testing import CliRunner

from ladder.backends.base import START
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.cli.main import app
from ladder.emit import best_config
from ladder.emit.exporters.registry import exported
from ladder.emit.files import OutputPaths
from ladder.emit.launch import launch_script
from ladder.emit.trainer import trainer_arguments
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.machine.machine_speed import machine_speed
from ladder.runs.snapshot import space_from_dict, space_to_dict
from ladder.search.belief import believe
from ladder.search.memory import MemoryObservation, calibrate_memory, predict_memory
from ladder.search.remedies import remedies
from ladder.search.space import Space
from ladder.search.speed import predict_speed
from ladder.techniques.keys import candidate_of
from ladder.techniques.liger import LIGER
from ladder.tuning.technique_choices import TechniqueChoices, advice, require_usable, techniques_tried
from ladder.units import GIB
from ladder.workload.workload import Workload

LARGE_VOCABULARY = bundled_workload("llama-3.2-1b", seq_len=1024, global_batch_size=32)


def on_liger(candidate: Candidate) -> Candidate:
    return replace(candidate, engine=candidate.engine.having(LIGER))


def peak(candidate: Candidate, workload: Workload = LARGE_VOCABULARY) -> int:
    return predict_memory(workload, candidate, world_size=1, device="cuda").peak


def test_it_is_in_the_engine_s_name_and_the_name_brings_it_back() -> None:
    candidate = on_liger(make_candidate("zero2+opt-cpu", micro_batch=2, accumulation=2))
    assert candidate.key == "zero2+opt-cpu+liger ckpt=on mb=2"
    assert candidate_of(candidate.key, 4) == candidate
    turned = replace(candidate, engine=replace(candidate.engine, knobs=(("overlap_comm", False),)))
    assert turned.engine.name == "zero2+opt-cpu+liger"
    assert candidate_of(turned.key, 4) == turned
    assert turned.engine.states == "zero2+opt-cpu[overlap_comm=False]"
    with pytest.raises(ValueError, match="not a candidate's key"):
        candidate_of("zero9+liger ckpt=on mb=1", 4)


def test_a_run_folder_remembers_it() -> None:
    engines = (Engine(RUNGS_BY_NAME["zero2"]), Engine(RUNGS_BY_NAME["zero2"], (("overlap_comm", False),), (LIGER,)))
    space = Space(
        workload=LARGE_VOCABULARY,
        world_size=1,
        device="cuda",
        memory_limit=40 * GIB,
        host_memory=100 * GIB,
        engines=engines,
        micro_batches=(1, 2),
    )
    assert space_from_dict(json.loads(json.dumps(space_to_dict(space)))) == space


def test_with_a_large_vocabulary_the_logits_hardly_count_any_more() -> None:
    small, large = (make_candidate("zero2", micro_batch=size, accumulation=32 // size) for size in (1, 16))
    usual, fused = peak(large) - peak(small), peak(on_liger(large)) - peak(on_liger(small))
    assert fused < 0.2 * usual
    parts = predict_memory(LARGE_VOCABULARY, on_liger(large), world_size=1, device="cuda").parts
    assert parts.logits < 2 * GIB


def test_without_checkpointing_a_block_keeps_less_but_not_nothing() -> None:
    candidate = make_candidate("zero2", checkpointing=False, micro_batch=8, accumulation=4)
    kept = [
        predict_memory(LARGE_VOCABULARY, each, world_size=1, device="cuda").moments["forward"]
        for each in (candidate, on_liger(candidate))
    ]
    assert 0.5 < kept[1] / kept[0] < 0.95


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
    ("workload", "device", "error", "words"),
    [
        (bundled_workload("opt-1.3b"), "cuda", UsageError, "not with opt for causal-lm"),
        (bundled_workload("roberta-base", task="masked-lm"), "cuda", UsageError, "not with roberta for masked-lm"),
        (LARGE_VOCABULARY, "cpu", UsageError, "need a GPU"),
        (LARGE_VOCABULARY, "cuda", EnvironmentFaultError, r"pip install liger-kernel"),
    ],
)
def test_where_it_cannot_be_one_sentence_says_why(
    workload: Workload, device: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(error, match=words):
        require_usable(LIGER, workload, device)


@pytest.mark.parametrize(
    ("installed", "asked", "workload", "device", "tries", "words"),
    [
        (True, None, LARGE_VOCABULARY, "cuda", True, "--no-liger leaves them out"),
        (True, False, LARGE_VOCABULARY, "cuda", False, ""),
        (True, None, LARGE_VOCABULARY, "cpu", False, ""),
        (True, None, bundled_workload("t0-3b", task="seq2seq-lm"), "cuda", False, ""),
        (False, None, LARGE_VOCABULARY, "cuda", False, "pip install liger-kernel"),
        (False, None, bundled_workload("llama-2-7b"), "cuda", False, ""),
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


def test_the_plan_shows_it_where_it_is_asked_for() -> None:
    done = CliRunner().invoke(
        app, ["plan", "llama-3.1-8b", "--machine", "a100-40", "--liger", "--format", "json"], catch_exceptions=False
    )
    assert {row["rung"].endswith("+liger") for row in json.loads(done.stdout)["rungs"]} == {True, False}


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


def test_every_file_says_how_to_switch_it_on(tmp_path: Path) -> None:
    chosen = Candidate(Engine(RUNGS_BY_NAME["zero2"], techniques=(LIGER,)), True, 4, 2)
    found, usual = answer(candidate=chosen), answer("zero2")
    config = tmp_path / "best_config.json"
    document, plain = best_config(found), best_config(usual)
    assert document["ladder"]["liger"] is True
    assert trainer_arguments(found, config)["use_liger_kernel"] is True
    assert "apply_liger_kernel(model, None)" in launch_script(found, OutputPaths.beside(config))
    assert "liger" not in launch_script(usual, OutputPaths.beside(config))
    axolotl, factory, trl = (
        yaml.safe_load(exported(document, config, to)) for to in ("axolotl", "llama-factory", "trl")
    )
    assert axolotl["plugins"] == ["axolotl.integrations.liger.LigerPlugin"]
    assert axolotl["liger_fused_linear_cross_entropy"] is True
    assert factory["enable_liger_kernel"] is True
    assert "use_liger_kernel" not in factory
    assert trl["use_liger_kernel"] is True
    for target in ("axolotl", "llama-factory", "trl", "trainer"):
        assert "liger" not in exported(plain, config, target)


def test_where_an_engine_has_started_so_does_the_same_one_on_ligers_kernels() -> None:
    alone = Engine(RUNGS_BY_NAME["zero2+opt-cpu"])  # DeepSpeed copies a rank's 16-bit weights while it starts
    space = space_of(alone, alone.having(LIGER), micro_batches=(1,))
    first, other = (next(iter(space.of_engine(engine))) for engine in space.engines)
    assert START in believe(space, ()).outlook(other).memory.moments
    assert START not in believe(space, (fitting(space, first),)).outlook(other).memory.moments
