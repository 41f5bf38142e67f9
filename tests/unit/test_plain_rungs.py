"""The rungs without DeepSpeed: what they need, where they work, and which answer is whose."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from helpers import bundled_workload, machine_with, make_candidate, make_record
from helpers.scripts import make_script, script_workload

from ladder.backends.plain.rungs import PLAIN_RUNGS
from ladder.backends.registry import RUNGS_BY_NAME, backend_of
from ladder.candidates import Candidate, Engine, Rung
from ladder.errors import UsageError
from ladder.events.outcome import Record
from ladder.machine.described import Machine
from ladder.options.checks import require_effective_options
from ladder.options.declaring import checked
from ladder.options.tune import TuneOptions
from ladder.search.policy import answer, faster_without_deepspeed
from ladder.tuning.obstacles import obstacles
from ladder.workload.lora import Lora
from ladder.workload.script import Generation
from ladder.workload.trained import LoadIn, check_trained
from ladder.workload.workload import Workload

LLAMA = bundled_workload("llama-2-7b")
P = LLAMA.model.num_parameters


def peak(rung: str, ranks: int, workload: Workload = LLAMA) -> float:
    """Bytes of the fullest moment with checkpointing and micro-batch 1."""
    candidate = Candidate(Engine(RUNGS_BY_NAME[rung]), 1, 1, 1)
    moments = backend_of(candidate.engine.rung).moments(workload, candidate, ranks, "cuda")
    return max(each.total for each in moments)


def proof(rung: str, speed: float) -> Record:
    return make_record(make_candidate(rung), tokens_per_second=speed, purpose="proof")


def reason_of(rung: Rung, machine: Machine, workload: Workload = LLAMA) -> str | None:
    return obstacles([rung], machine, workload).get(rung.name)


def test_fsdp2_works_on_gpus_offloads_on_several_and_needs_no_operator_of_deepspeed() -> None:
    sharded = [rung for rung in PLAIN_RUNGS if rung.stage]
    for rung in sharded:
        assert reason_of(rung, machine_with(2)) is None
        on_one = "on one GPU, DeepSpeed's offload does the same" if rung.devices else None
        assert reason_of(rung, machine_with(1)) == on_one
        assert "on GPUs only" in str(reason_of(rung, machine_with(2, "cpu")))
        assert backend_of(rung).operators(rung, "adamw") == ()
    assert all(backend_of(rung).obstacle(replace(LLAMA, dtype="fp16"), rung) for rung in sharded)


def test_fsdp2_is_not_tried_with_a_model_that_accelerate_cannot_divide() -> None:
    shared = replace(LLAMA, model=replace(LLAMA.model, fails_with_fsdp2=True))
    for rung in PLAIN_RUNGS:
        assert ("belong to two" in backend_of(rung).obstacle(shared, rung)) is (rung.stage > 0)


@pytest.mark.parametrize(("load_in", "is_divided"), [(None, True), ("4bit", True), ("8bit", False)])
def test_fsdp2_divides_weights_beside_adapters_unless_they_have_8_bits(
    load_in: LoadIn | None, is_divided: bool
) -> None:
    adapters = replace(LLAMA, lora=Lora(rank=8), load_in=load_in)
    refused = [backend_of(rung).obstacle(adapters, rung) for rung in PLAIN_RUNGS if rung.stage]
    assert [not why for why in refused] == [is_divided] * len(refused)
    assert all("4bit" in why for why in refused if why)
    if is_divided:  # at first, every rank has all packed weights
        share = 0.5 if load_in is None else 1.0
        assert peak("fsdp2", 8, workload=adapters) < share * peak("ddp", 8, workload=adapters)


def test_a_model_is_prepared_for_few_bits_only_if_it_is_loaded_in_them() -> None:
    with pytest.raises(UsageError, match=r"--prepare-kbit needs --load-in"):
        check_trained(LLAMA.model, Lora(rank=8), None, (), prepare_kbit=True)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"kind": "deepspeed"}, "calls DeepSpeed itself"),
        ({"generation": Generation(batch=8, micro_steps=None, per_prompt=4, longest=32)}, "generates"),
    ],
)
def test_a_script_that_only_deepspeed_can_train_says_why(facts: dict[str, Any], said: str) -> None:
    ddp, fsdp2 = RUNGS_BY_NAME["ddp"], RUNGS_BY_NAME["fsdp2"]
    assert said in backend_of(ddp).obstacle(script_workload(make_script(**facts)), ddp)
    for kind, rung in itertools.product(("trainer", "accelerate"), (ddp, fsdp2)):
        assert backend_of(rung).obstacle(script_workload(make_script(kind=kind)), rung) == ""


def test_a_script_that_trains_16_bit_weights_may_go_on_with_half_the_bytes_and_is_cautioned() -> None:
    own, wide = (script_workload(make_script(trains_16_bits=is_short)) for is_short in (True, False))
    ddp, fsdp2, zero2 = (RUNGS_BY_NAME[name] for name in ("ddp", "fsdp2", "zero2"))
    assert [backend_of(rung).obstacle(own, rung) for rung in (ddp, fsdp2, zero2)] == ["", "", ""]
    assert ["without an fp32 copy" in backend_of(rung).caution(own, rung) for rung in (ddp, fsdp2)] == [True, False]
    assert not any(backend_of(rung).caution(wide, rung) for rung in (ddp, fsdp2))
    assert not backend_of(zero2).caution(own, zero2)
    states = 16 * own.model.num_parameters
    assert peak("ddp", 1, workload=wide) - peak("ddp", 1, workload=own) > 0.45 * states
    assert peak("fsdp2", 1, workload=wide) == peak("fsdp2", 1, workload=own)


def test_fsdp2_needs_a_loop_to_prepare_model_and_optimizer_at_once_and_shards_on_cpu_ranks_for_scripts_alone() -> None:
    ddp, fsdp2 = RUNGS_BY_NAME["ddp"], RUNGS_BY_NAME["fsdp2"]
    apart = script_workload(make_script(kind="accelerate", optimizer=""))
    assert "in one call of accelerator.prepare()" in backend_of(fsdp2).obstacle(apart, fsdp2)
    assert backend_of(ddp).obstacle(apart, ddp) == ""
    on_cpu = machine_with(2, "cpu")
    own = script_workload(make_script(kind="trainer"))
    assert reason_of(fsdp2, on_cpu, own) is None
    assert "on GPUs only" in str(reason_of(fsdp2, on_cpu))
    assert "host memory already" in str(reason_of(RUNGS_BY_NAME["fsdp2+cpu"], on_cpu, own))


def test_fsdp2_needs_host_memory_for_the_weights_that_each_rank_reads_unless_they_are_loaded_packed() -> None:
    def needs(name: str, **changes: Any) -> float:
        found = Candidate(Engine(RUNGS_BY_NAME[name]), 0, 1, 1)
        return backend_of(found.engine.rung).host_bytes(replace(LLAMA, **changes), found, 8)[0]

    assert needs("ddp") == needs("fsdp2", lora=Lora(rank=8), load_in="4bit") == 0
    assert needs("fsdp2") == needs("fsdp2+no-reshard") > 1.9 * needs("fsdp2", lora=Lora(rank=8)) > 8 * 2 * P
    assert needs("fsdp2+cpu") >= needs("fsdp2")


def test_the_answer_is_deepspeeds_fastest_and_another_counts_only_if_it_is_faster_by_more_than_the_tolerance() -> None:
    own = [proof("zero1", 100.0), proof("zero2", 120.0)]
    assert answer([*own, proof("ddp", 200.0)]) == own[1]
    assert faster_without_deepspeed([*own, proof("ddp", 121.0)], 0.02) is None
    assert faster_without_deepspeed([*own, proof("ddp", 130.0)], 0.02) == proof("ddp", 130.0)
    alone = [proof("ddp", 10.0)]
    assert faster_without_deepspeed(alone, 0.02) == answer(alone) == alone[0]
    assert faster_without_deepspeed([], 0.02) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rungs": ("ddp",), "backend": "deepspeed"}, "use --backend all"),
        ({"rungs": ("zero1",), "backend": "torch"}, "not among the rungs of --backend torch"),
        ({"backend": "torch", "documented": True}, "--documented leaves out"),
        ({"backend": "torch", "strategy": "walk"}, "follows the documented ladder"),
    ],
)
def test_a_backend_that_cannot_have_an_effect_is_refused_in_one_sentence(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        require_effective_options(checked(TuneOptions(model="tiny-llama", **options)))  # type: ignore[arg-type]
