"""Activations that wait on the host: where they are tried, what that takes and saves, and how it is emitted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import bundled_workload, make_record
from helpers.answers import answer

from ladder.backends.deepspeed.rungs import RUNGS
from ladder.candidates import Candidate, Engine
from ladder.emit import best_config
from ladder.emit.exporters.registry import exported
from ladder.emit.files import OutputPaths
from ladder.emit.launch import launch_script
from ladder.emit.settings import settings_in
from ladder.emit.trainer import trainer_arguments
from ladder.errors import UsageError
from ladder.machine.machine_speed import machine_speed
from ladder.search.memory import predict_memory
from ladder.search.policy import documented_steps
from ladder.search.remedies import remedies
from ladder.search.space import Space, ruled_out, same_steps
from ladder.search.speed import predict_speed
from ladder.techniques.keys import candidate_of, engine_named
from ladder.tuning.parity import as_reference
from ladder.tuning.technique_choices import ways_of_checkpointing
from ladder.units import GIB
from ladder.workload.workload import Workload

LONG = bundled_workload("llama-3.2-1b", seq_len=98304, global_batch_size=4)
ENGINE = engine_named("zero2+opt-cpu+liger")
KEPT, OFFLOADED = (candidate_of(f"{ENGINE.name} ckpt={kind} mb=1", 4) for kind in ("on", "cpu"))
INPUT = 98304 * LONG.model.hidden_size * 2
"""Bytes that a layer is given in 16 bits."""


def space_of(limit: float, **changes: Any) -> Space:
    settings: dict[str, Any] = {
        "workload": LONG,
        "world_size": 1,
        "device": "cuda",
        "memory_limit": int(limit * GIB),
        "host_memory": 1 << 60,
        "engines": (ENGINE,),
        "micro_batches": (1, 2),
        "checkpointing": ("cpu",),
    }
    return Space(**settings | changes)


def offloading(space: Space) -> list[str]:
    return [candidate.key for candidate in space.candidates if candidate.offload_activations]


def peak(candidate: Candidate, workload: Workload = LONG) -> int:
    return predict_memory(workload, candidate, world_size=1, device="cuda").peak


def test_a_candidate_s_key_says_so_and_is_read_back() -> None:
    assert replace(KEPT, offload_activations=True) == OFFLOADED
    assert OFFLOADED.key == "zero2+opt-cpu+liger ckpt=cpu mb=1"
    assert OFFLOADED.gradient_checkpointing
    assert OFFLOADED.setup == KEPT.setup  # they can share a trial


def test_they_are_tried_where_checkpointing_alone_is_not_sure_to_make_the_smallest_micro_batch_fit() -> None:
    tight, hopeless, roomy = peak(KEPT) / GIB, 0.9 * peak(OFFLOADED) / GIB, 1.3 * peak(KEPT) / GIB
    assert offloading(space_of(tight)) == [OFFLOADED.key]
    assert offloading(space_of(hopeless)) == offloading(space_of(roomy)) == []


def test_they_are_not_tried_unless_transformers_can_nor_on_a_cpu_nor_with_an_encoder_and_a_decoder() -> None:
    tight = peak(KEPT) / GIB
    assert not offloading(space_of(tight, checkpointing=()))
    assert not offloading(space_of(tight, device="cpu"))
    both = replace(LONG, model=replace(LONG.model, is_encoder_decoder=True), task="seq2seq-lm")
    limit = 0.9 * peak(KEPT, both) / GIB
    assert not offloading(space_of(limit, workload=both))
    assert not space_of(limit, workload=both).ways_of_checkpointing


@pytest.mark.parametrize(("version", "expected"), [("5.22.0", False), ("5.23.0", True), ("not installed", False)])
def test_they_need_a_transformers_whose_trainer_can_do_it(version: str, expected: bool) -> None:
    assert ("cpu" in ways_of_checkpointing(version)) is expected


def test_all_layers_inputs_but_one_leave_the_gpu_for_page_locked_memory() -> None:
    kept, offloaded = (predict_memory(LONG, each, world_size=1, device="cuda") for each in (KEPT, OFFLOADED))
    layers = LONG.model.num_layers
    assert kept.parts.activations - offloaded.parts.activations == pytest.approx((layers - 1) * INPUT, rel=0.01)
    assert offloaded.pinned - kept.pinned >= layers * INPUT
    assert offloaded.host - kept.host == pytest.approx(offloaded.pinned - kept.pinned, rel=0.01)


def test_all_ranks_of_a_host_have_theirs_there_also_of_a_rung_that_offloads_nothing() -> None:
    candidate = candidate_of("zero3+liger ckpt=cpu mb=1", 4, 4)
    predicted = predict_memory(LONG, candidate, world_size=4, device="cuda")
    assert predicted.pinned >= 4 * LONG.model.num_layers * INPUT


@pytest.mark.parametrize(
    ("key", "seq_len", "allocated"),
    [
        ("zero2+opt-cpu+liger ckpt=cpu mb=1", 98304, 12.80),
        ("zero3+param-cpu+opt-cpu+liger ckpt=cpu mb=1", 98304, 11.60),
        ("zero3+liger ckpt=cpu mb=1", 65536, 25.19),
        ("zero3+liger ckpt=on mb=1", 65536, 28.94),
        ("zero1+opt-cpu+liger ckpt=on mb=1", 65536, 13.60),
    ],
)
def test_what_an_h200_took_with_long_sequences_is_known_before_any_trial(
    key: str, seq_len: int, allocated: float
) -> None:
    """Allocated GiB in benchmarks/results/1xh200-more-rungs, nothing accumulated."""
    workload = replace(LONG, seq_len=seq_len, global_batch_size=1)
    predicted = predict_memory(workload, candidate_of(key, 1), world_size=1, device="cuda")
    assert max(predicted.moments.values()) / GIB == pytest.approx(allocated, rel=0.015)


def test_the_copies_take_time() -> None:
    machine = machine_speed("NVIDIA H200", "cuda", 1, 16)
    kept, offloaded = (predict_speed(LONG, each, world_size=1, machine=machine) for each in (KEPT, OFFLOADED))
    assert 0.9 * kept.tokens_per_second < offloaded.tokens_per_second < 0.99 * kept.tokens_per_second


def test_what_ran_out_with_them_does_so_without_but_not_the_other_way_round_nor_for_the_host_s_sake() -> None:
    space = space_of(peak(KEPT) / GIB)
    assert ruled_out(KEPT, space, [make_record(OFFLOADED, kind="gpu_oom")])
    assert not ruled_out(OFFLOADED, space, [make_record(KEPT, kind="gpu_oom")])
    assert not ruled_out(KEPT, space, [make_record(OFFLOADED, kind="host_oom")])


def test_their_losses_are_compared_of_their_own_with_those_of_the_plain_rung() -> None:
    assert not same_steps(KEPT, OFFLOADED)
    assert as_reference(OFFLOADED).checkpointing == "off"


def test_the_documented_walk_knows_nothing_of_them() -> None:
    few_words = replace(LONG, model=replace(LONG.model, vocab_size=1000))
    tight = peak(candidate_of("zero2+opt-cpu ckpt=on mb=1", 4), few_words) / GIB
    space = space_of(tight, engines=tuple(map(Engine, RUNGS)), workload=few_words)
    assert offloading(space)
    assert not any(step.offload_activations for step in documented_steps(space))


def test_a_remedy_counts_on_them_and_they_are_tried_there() -> None:
    longest = [remedies(space_of(10, checkpointing=ways)).seq_len or 0 for ways in ((), ("cpu",))]
    assert longest[1] > 1.3 * longest[0] > 0
    assert offloading(space_of(10, workload=replace(LONG, seq_len=longest[1]))) == [OFFLOADED.key]
    enough = remedies(space_of(10)).gpu_memory or 0
    assert offloading(space_of(enough / GIB)) == [OFFLOADED.key]


def test_a_host_that_has_no_room_for_them_is_not_asked_to_grow_for_their_sake() -> None:
    roomy = 1.3 * peak(KEPT) / GIB
    small = space_of(roomy, host_memory=16 * GIB)
    needs = predict_memory(LONG, KEPT, world_size=1, device="cuda").host
    assert (remedies(small).host_memory or 0) == pytest.approx(needs, rel=0.01)


def test_where_they_save_little_they_are_tried_only_if_nothing_else_makes_it_fit() -> None:
    short = replace(LONG, seq_len=8192)
    kept, offloaded = peak(KEPT, short) / GIB, peak(OFFLOADED, short) / GIB
    assert kept - offloaded < 0.1 * kept
    assert offloading(space_of((kept + offloaded) / 2, workload=short)) == [OFFLOADED.key]
    assert not offloading(space_of(kept, workload=short))


def test_the_emitted_files_switch_it_on_and_are_read_back(tmp_path: Path) -> None:
    found = answer(candidate=replace(answer().candidate, offload_activations=True))
    config = tmp_path / "best_config.json"
    arguments, document = trainer_arguments(found, config), best_config(found)
    assert arguments["gradient_checkpointing_kwargs"] == {"use_reentrant": False, "offload": True}
    assert "activations on the host (offload" in launch_script(found, OutputPaths.beside(config))
    assert settings_in(json.loads(json.dumps(document))).checkpointing == "cpu"
    assert yaml.safe_load(exported(document, config, "axolotl"))["gradient_checkpointing_kwargs"]["offload"] is True
    with pytest.raises(UsageError, match="--for llama-factory: it has no setting to keep activations"):
        exported(document, config, "llama-factory")
