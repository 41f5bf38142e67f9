"""The simulator's physics: a hypothesis of its own, held against what was measured."""

from __future__ import annotations

import ast
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import bundled_workload, make_candidate

import ladder.simulation
from ladder.backends.deepspeed.rungs import RUNGS
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.simulation.allocation import Ledger
from ladder.simulation.gathering import gathering_of
from ladder.simulation.host_memory import host_use
from ladder.simulation.kinds import assignment_of
from ladder.simulation.memory_walk import walk_memory
from ladder.simulation.paper_machine import read_machine
from ladder.simulation.physics import Physics, Truth
from ladder.simulation.technique_effects import NEUTRAL, effects_of
from ladder.techniques.adam_8bit import ADAM_8BIT
from ladder.techniques.bf16_states import BF16_STATES
from ladder.techniques.liger import LIGER
from ladder.techniques.ulysses import ULYSSES
from ladder.units import GIB

SOURCES = sorted(Path(ladder.simulation.__file__).parent.glob("*.py"))
THE_MODEL = (
    "ladder.search",
    "ladder.backends.activations",
    "ladder.backends.deepspeed.moments",
    "ladder.backends.plain.moments",
)
TECHNIQUES = (
    "liger",
    "ulysses",
    "numerics",
    "bf16_states",
    "adam_8bit",
    "unchecked_gradients",
    "LIGER",
    "ULYSSES",
    "BF16_STATES",
    "ADAM_8BIT",
    "UNCHECKED_GRADIENTS",
)
EXACT = read_machine("h200").model_copy(update={"surprise": 0.0, "rank_spread": 0.0})
LLAMA = bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=64)
SMALL = bundled_workload("llama-3.2-1b", seq_len=2048, global_batch_size=32)


def truth(candidate: Candidate, workload=LLAMA, ranks: int = 4, **changes: object) -> Truth:
    machine = EXACT.model_copy(update={"num_gpus": ranks, **changes})
    return Physics(machine, workload, ranks).truth(candidate)


def test_the_simulator_shares_no_formula_with_the_model_that_it_tests():
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.startswith(THE_MODEL)], f"{source.name} imports {names}"


def test_one_module_knows_what_techniques_do_and_another_reads_them_from_a_specification():
    for source in SOURCES:
        if source.name not in ("technique_effects.py", "physics.py", "launcher.py"):
            used = {node.attr for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Attribute)}
            assert not used & set(TECHNIQUES), source.name


def test_memory_is_what_was_measured(measured_points):
    errors = {}
    for point in measured_points:
        if point.allocated_gib is not None and "nvme" not in point.candidate.engine.rung.devices:
            said = truth(point.candidate, point.workload).allocated / GIB
            errors[point.candidate.key, point.num_layers] = said / point.allocated_gib - 1
    assert len(errors) > 80
    assert statistics.mean(map(abs, errors.values())) < 0.012
    assert max(map(abs, errors.values())) < 0.05


def test_times_are_near_what_was_measured(measured_points):
    logarithms = []
    for point in measured_points:
        if point.boundary_seconds and "nvme" not in point.candidate.engine.rung.devices:
            known = truth(point.candidate, point.workload, num_cores=64)
            logarithms.append(math.log(known.accumulate_seconds / point.accumulate_seconds))
            logarithms.append(math.log(known.boundary_seconds / point.boundary_seconds))
    assert 0.85 < math.exp(statistics.mean(logarithms)) < 1.2
    assert statistics.pstdev(logarithms) < 0.25
    assert max(map(abs, logarithms)) < math.log(2)


def test_stage_1_keeps_its_buckets_while_it_accumulates():
    """Recorded with Llama-3.2-1B on one H200, micro-batch 16: 0.575 GiB more than stage 2, two buckets."""
    overlaps = (("overlap_comm", True),)
    first, second = (
        truth(Candidate(Engine(RUNGS_BY_NAME[name], overlaps), 0, 16, 2), SMALL, 1) for name in ("zero1", "zero2")
    )
    assert (first.allocated - second.allocated) / GIB == pytest.approx(119.589 - 119.014, abs=0.01)


def test_stage_1_keeps_all_gradients_until_backward_is_over_unless_it_overlaps():
    peaks = {}
    for overlap in (True, False):
        engine = Engine(RUNGS_BY_NAME["zero1"], (("overlap_comm", overlap),))
        peaks[overlap] = truth(Candidate(engine, 1, 1, 1), LLAMA, 64).allocated
    assert peaks[False] - peaks[True] > 1.5 * LLAMA.model.num_parameters


def test_a_checkpointed_layer_keeps_its_input_alone_and_one_on_the_host_not_even_that():
    size = 8
    kept = truth(make_candidate("zero2+opt-cpu", checkpointing=False, micro_batch=size))
    every, half, away = (
        truth(
            replace(
                make_candidate("zero2+opt-cpu", micro_batch=size), checkpoint_every=number, offload_activations=host
            )
        )
        for number, host in ((1, False), (2, False), (1, True))
    )
    assert kept.allocated > half.allocated > every.allocated > away.allocated
    inputs = LLAMA.model.num_layers * 2 * size * LLAMA.seq_len * LLAMA.model.hidden_size
    assert every.allocated - away.allocated == pytest.approx(inputs, rel=0.1)
    assert away.host - every.host == pytest.approx(4 * inputs, rel=0.01)
    assert kept.accumulate_seconds < half.accumulate_seconds < every.accumulate_seconds < away.accumulate_seconds


def test_half_checkpointing_deviates_as_the_layers_that_it_leaves_alone_do():
    """A machine on which activations without checkpointing take more, takes more with half of it too."""
    peaks = {}
    for factor in (1.0, 1.2):
        for every in (0, 1, 2):
            assignment = assignment_of(
                LLAMA, replace(make_candidate("zero2", micro_batch=8), checkpoint_every=every), 4
            )
            ledger = Ledger({"activations": factor})
            peaks[every, factor] = walk_memory(assignment, gathering_of(assignment), ledger).peak
    more = {every: peaks[every, 1.2] - peaks[every, 1.0] for every in (0, 1, 2)}
    assert more[1] == 0
    assert 0.4 < more[2] / more[0] < 0.6


def test_stage_3_gathers_up_to_its_cap_and_needs_all_parameters_twice():
    lean, usual = (assignment_of(LLAMA, make_candidate(name), 4) for name in ("zero3+param-cpu+opt-cpu+lean", "zero3"))
    for assignment in (lean, usual):
        gathering = gathering_of(assignment)
        cap = assignment.knobs["stage3_max_live_parameters"]
        assert (
            max(gathering.live) <= cap + 2 * assignment.network.head + assignment.knobs["stage3_prefetch_bucket_size"]
        )
        assert sum(fetch.elements for fetch in gathering.fetches) > 1.7 * LLAMA.model.num_parameters
        assert all(fetch.issued <= fetch.needed for fetch in gathering.fetches)
    assert max(gathering_of(lean).live) < max(gathering_of(usual).live) / 3
    assert not gathering_of(assignment_of(LLAMA, make_candidate("zero3"), 1)).fetches  # one rank has all of it
    assert not gathering_of(assignment_of(LLAMA, make_candidate("zero2"), 4)).fetches


def test_stage_3_starts_with_its_share_of_weights_master_weights_and_gradients_however_many_ranks_there_are():
    """Its zero gradient is smaller: two ranks of real DeepSpeed give it half of the elements of a sub-group."""
    few, many = (truth(make_candidate("zero3"), ranks=ranks).at_start for ranks in (4, 512))
    weights_master_and_gradients = 2 + 4 + 2
    shares = LLAMA.weights.total * (1 / 4 - 1 / 512)
    assert few - many == pytest.approx(weights_master_and_gradients * shares, rel=0.01)


def test_each_technique_has_the_effects_of_its_own_and_together_they_have_all():
    plain = Engine(RUNGS_BY_NAME["zero3"])
    assert effects_of(plain) == NEUTRAL
    both = effects_of(plain.having(LIGER).having(BF16_STATES))
    assert both.chunked_loss
    assert both.master_bytes == both.moment_bytes == 2
    for technique in (LIGER, BF16_STATES, ADAM_8BIT, ULYSSES):
        candidate = replace(make_candidate("zero3", micro_batch=4), engine=plain.having(technique))
        assert truth(candidate).allocated < truth(make_candidate("zero3", micro_batch=4)).allocated, technique


def test_the_fullest_moment_moves_from_the_step_to_the_loss_as_the_micro_batch_grows():
    """Measured with a vocabulary of 152k at stage 2; here 128k: the step at micro-batch 1, the loss at 8."""
    moments = [truth(make_candidate("zero2", micro_batch=size), SMALL, 1).moment for size in (1, 8)]
    assert moments == ["step", "loss"]


def test_the_host_holds_what_was_recorded():
    """All ranks' resident memory in GiB: Llama-2-7B on four GPUs, Llama-3.2-1B on one."""
    recorded = [
        (LLAMA, 4, {"zero2+opt-cpu": 154.8, "zero3+opt-cpu": 131.5, "zero3+param-cpu+opt-cpu": 164.0}),
        (SMALL, 1, {"zero1+opt-cpu": 31.35, "zero2+opt-cpu": 33.65, "zero3+opt-cpu": 25.0, "zero3": 1.65}),
    ]
    for workload, ranks, figures in recorded:
        for rung, gib in figures.items():
            use = host_use(assignment_of(workload, make_candidate(rung), ranks))
            assert use.resident * ranks / GIB == pytest.approx(gib, rel=0.05), rung


@pytest.mark.parametrize("rung", [rung.name for rung in RUNGS])
def test_every_rung_has_a_truth_that_follows_from_the_seed(rung: str):
    machine = EXACT.model_copy(update={"surprise": 1.0})
    known, again, other = (
        Physics(machine.model_copy(update={"seed": seed}), LLAMA, 8).truth(make_candidate(rung)) for seed in (1, 1, 2)
    )
    assert known == again != other
    assert 0 < known.accumulate_seconds < known.boundary_seconds
    assert 0 < known.allocated <= known.reserved
    assert (known.disk > 0) == ("nvme" in rung)


def test_a_ledger_remembers_the_fullest_moment():
    ledger = Ledger({"doubled": 2.0})
    ledger.take("a", 1000)
    ledger.moment = "loss"
    ledger.touch(1000, "doubled")
    ledger.moment = "step"
    ledger.set("a", 10)
    assert (ledger.now, ledger.peak, ledger.fullest) == (512, 1024 + 2048, "loss")
    ledger.give("a")
    ledger.give("a")
    assert ledger.now == 0


@pytest.mark.parametrize("model", ["opt-125m", "t0-3b", "roberta-base", "qwen2.5-7b", "tiny-llama"])
def test_all_parameters_are_among_the_operations(model: str):
    assignment = assignment_of(bundled_workload(model), make_candidate("zero3"), 2)
    network, shape = assignment.network, assignment.workload.model
    counted = shape.num_layers * sum(each.elements for each in network.block) + network.table
    counted += 0 if shape.tied else network.head
    assert counted == pytest.approx(shape.num_parameters, rel=0.03)
