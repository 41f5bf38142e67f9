"""The winner's knobs: what can be turned, in which order it is tried, and what is kept of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import bundled_workload, make_candidate, make_measurement, make_record
from helpers.searches import make_space

from ladder.backends.deepspeed.config import deepspeed_config
from ladder.backends.deepspeed.rungs import RUNGS
from ladder.backends.registry import backend_of
from ladder.candidates import Candidate, Engine
from ladder.events.outcome import Record
from ladder.search.decisions import Measure, Stop
from ladder.search.knobs import knobs_of, less_noise, plain, with_knobs
from ladder.search.space import Space
from ladder.step.counted import Device
from ladder.tuning.knob_study import next_knobs

WORKLOAD = bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=64)
WINNER = make_candidate("zero3+opt-cpu", micro_batch=4, accumulation=4)
SLOWER = make_candidate("zero2", micro_batch=1, accumulation=16)
EVERY_RUNG = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)


@pytest.fixture
def space() -> Space:
    return make_space("zero3+opt-cpu", "zero2", micro_batches=(1, 2, 4), gpu_name=None, num_cores=16)


def measured(candidate: Candidate, speed: float, trial: str = "0001", spread: float = 0.001) -> Record:
    return make_record(candidate, trial=trial, tokens_per_second=speed, measurement=make_measurement(spread=spread))


@EVERY_RUNG
def test_every_knob_has_our_own_value_among_its_choices_and_another(rung):
    own = knobs_of(WORKLOAD, Engine(rung), 4)
    choices = backend_of(rung).knob_choices(WORKLOAD, Engine(rung), 4)
    assert set(own) == set(choices)
    assert all(own[name] in options and len(set(options)) > 1 for name, options in choices.items())
    assert bool(choices) == (rung.stage > 0)


@EVERY_RUNG
def test_every_choice_reaches_deepspeed(rung):
    plainly = Candidate(Engine(rung), True, 1, 16)
    for name, options in backend_of(rung).knob_choices(WORKLOAD, plainly.engine, 4).items():
        for value in options:
            candidate = with_knobs(WORKLOAD, plainly, {**knobs_of(WORKLOAD, plainly.engine, 4), name: value}, 4)
            zero = deepspeed_config(
                WORKLOAD, candidate.engine, micro_batch=1, accumulation=16, world_size=4, nvme_path=Path("/nvme")
            )["zero_optimization"]
            offloads = [zero[key] for key in ("offload_optimizer", "offload_param") if key in zero]
            places = offloads if name == "pin_memory" else [zero]
            assert places
            assert all(place[name] == value for place in places)


def play(space: Space, num_trials: int, speed_of_unpinned: float) -> list[Record]:
    """A study in which nothing counts but whether memory is pinned; what keeps fewer buffers does not fit."""
    records = [measured(SLOWER, 50.0), measured(WINNER, 100.0)]
    for number in range(num_trials + 1):
        decision = next_knobs(space, records, num_trials)
        if isinstance(decision, Stop):
            assert number == num_trials
            return records
        (candidate,) = decision.candidates
        assert plain(candidate) == WINNER
        assert candidate.key not in {record.candidate_key for record in records}
        values, trial = knobs_of(space.workload, candidate.engine, 4), f"{number + 2:04d}"
        if not values["overlap_comm"]:
            records.append(make_record(candidate, "gpu_oom", trial=trial))
        else:
            records.append(measured(candidate, 100.0 if values["pin_memory"] else speed_of_unpinned, trial))
    raise AssertionError("it asks for more than it may")


def test_as_many_settings_of_the_fastest_candidate_are_asked_for_as_may_be_and_none_twice(space):
    assert len(play(space, 10, 120.0)) == 12


def test_a_winner_timed_over_one_step_is_timed_again_once_before_its_knobs_are_turned(space):
    once = make_record(WINNER, tokens_per_second=100.0, measurement=make_measurement(num_steps=1))
    again = next_knobs(space, [once], 4)
    assert isinstance(again, Measure)
    assert (again.candidates, again.precise) == ((WINNER,), True)
    for steps in (1, 3):
        later = make_record(WINNER, trial="0002", tokens_per_second=99.0, measurement=make_measurement(num_steps=steps))
        turned = next_knobs(space, [once, later], 4)
        assert isinstance(turned, Measure)
        assert turned.precise
        assert turned.candidates != (WINNER,)


def test_what_was_fast_and_what_did_not_fit_is_learnt(space):
    late = play(space, 24, 150.0)[-8:]
    values = [knobs_of(WORKLOAD, space.by_key[record.candidate_key].engine, 4) for record in late]
    assert sum(not each["pin_memory"] for each in values) >= 6
    assert sum(each["overlap_comm"] for each in values) >= 6


@pytest.mark.parametrize(
    ("speed", "spread", "kept"), [(101.0, 0.0, False), (104.0, 0.0, True), (104.0, 0.05, False), (99.0, 0.0, False)]
)
def test_a_setting_is_kept_only_when_its_gain_is_more_than_noise(space, speed, spread, kept):
    turned = with_knobs(WORKLOAD, WINNER, {"overlap_comm": False}, 4)
    records = [measured(WINNER, 100.0), measured(turned, speed, "0002", spread)]
    assert [record.candidate_key for record in less_noise(space, records)] == [
        WINNER.key,
        *([turned.key] if kept else []),
    ]


IN_DOUBT = make_candidate("zero1", micro_batch=4, accumulation=2)


def test_without_a_number_the_winner_is_tried_once_without_overlap_and_nothing_else_is(space):
    small = bundled_workload("opt-125m", seq_len=512, global_batch_size=32)
    space = replace(space, workload=small, engines=(IN_DOUBT.engine,), micro_batches=(4,))
    records = [measured(IN_DOUBT, 100.0)]
    asked = next_knobs(space, records, None)
    assert isinstance(asked, Measure)
    assert [candidate.engine.knobs for candidate in asked.candidates] == [(("overlap_comm", False),)]
    assert asked.precise
    records.append(measured(asked.candidates[0], 120.0, "0002"))
    assert isinstance(next_knobs(space, records, None), Stop)
    assert isinstance(next_knobs(space, records, 1), Stop)
    assert isinstance(next_knobs(space, records, 2), Measure)


def test_overlap_is_not_in_doubt_where_it_changes_little_or_was_not_measured():
    settled: list[tuple[Candidate, int, Device]] = [
        (IN_DOUBT, 1, "cuda"),
        (IN_DOUBT, 4, "cpu"),
        (make_candidate("zero1", micro_batch=1, accumulation=8), 4, "cuda"),
        (make_candidate("zero0"), 4, "cuda"),
        (make_candidate("zero1+opt-cpu"), 4, "cuda"),
        (make_candidate("zero3"), 4, "cuda"),
        (make_candidate("ddp"), 4, "cuda"),
    ]
    for candidate, world_size, device in settled:
        assert not backend_of(candidate.engine.rung).knobs_in_doubt(candidate, world_size, device), candidate.key
    often = make_candidate("zero2", micro_batch=1, accumulation=8)
    assert backend_of(often.engine.rung).knobs_in_doubt(often, 4, "cuda"), "stage 2 reduces in each micro-step"


def test_a_setting_that_is_predicted_to_be_far_slower_is_not_tried_without_a_number(space):
    assert backend_of(SLOWER.engine.rung).knobs_in_doubt(SLOWER, 4, "cuda")
    records = [measured(SLOWER, 50.0)]
    assert isinstance(next_knobs(space, records, None), Stop)
    assert isinstance(next_knobs(space, records, 1), Measure)
