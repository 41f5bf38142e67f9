"""What was seen of a trial gives one cause, whatever the order in which the ranks died."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    WORLD_SIZE,
    as_a_rank_sees,
    bundled_workload,
    make_candidate,
    make_measurement,
    make_record,
    there,
    tiny_trial,
)
from helpers.events import measured_event

from ladder.events.outcome import OutcomeKind, Record
from ladder.events.promise import apart, new_lengths, paced_by_cpu, promised_range, window_speeds
from ladder.events.protocol import (
    DoneEvent,
    Event,
    FailedEvent,
    MeasuredEvent,
    Phase,
    PhaseEvent,
    TrialSpec,
)
from ladder.events.trial_run import DeviceUse, Ending, TrialRun
from ladder.events.verdict import judge, trial_seconds
from ladder.search.space import proofs_before
from ladder.units import GIB, MIB

FIRST, SECOND = make_candidate(micro_batch=1, accumulation=4), make_candidate(micro_batch=2, accumulation=2)
WORKLOAD = bundled_workload()
LIMIT = 10 * GIB


def spec(world_size: int = WORLD_SIZE, **changes: Any) -> TrialSpec:
    candidates = (as_a_rank_sees(FIRST), as_a_rank_sees(SECOND))
    base = tiny_trial(Path("/run/trials/0007"), 1, memory_limit=LIMIT)
    told: dict[str, Any] = {"world_size": world_size, "candidates": candidates}
    return replace(base, **(told | changes))


def phase(name: Phase, t: float = 0.0) -> PhaseEvent:
    return PhaseEvent(t=t, phase=name)


def measured(candidate: str = FIRST.key, t: float = 5.0, **changes: Any) -> MeasuredEvent:
    settings: dict[str, Any] = {
        "began": 1.0,
        "accumulate_seconds": [1.0, 5.0, 1.1],
        "boundary_seconds": [2.0, 9.0, 2.2],
        "peak_allocated": GIB,
        "peak_reserved": 2 * GIB,
        "peak_device": 3 * GIB,
        "outside_torch": GIB,
        "peak_host": 4 * GIB,
    }
    return measured_event(candidate, t=t, **settings | changes)


def failed(outcome: OutcomeKind = "gpu_oom", t: float = 6.0, **changes: Any) -> FailedEvent:
    settings: dict[str, Any] = {"candidate": SECOND.key, "moment": "backward"}
    settings["message"] = "RuntimeError: it failed\nat length"
    return FailedEvent(t=t, outcome=outcome, **settings | changes)


def peer_error(t: float) -> FailedEvent:
    return failed("crash", t, message="RuntimeError: Connection closed by peer", consequence=True)


def records_of(*events: list[Event], trial: TrialSpec | None = None, **changes: Any) -> list[Record]:
    run = TrialRun(spec=trial or spec(len(events)), events=list(events), **changes)
    return judge(run, WORKLOAD, (FIRST, SECOND))


def only(records: list[Record]) -> Record:
    assert len(records) == 1
    return records[0]


def whole_report() -> list[Event]:
    return [measured(), measured(SECOND.key, 6.0), phase("teardown", 6.0), DoneEvent(t=7.0)]


def test_when_every_rank_reports_everything_all_candidates_fit() -> None:
    records = records_of(whole_report(), whole_report(), exits={0: 0, 1: 0})
    assert [(record.candidate_key, record.outcome.kind) for record in records] == [
        (FIRST.key, "fits"),
        (SECOND.key, "fits"),
    ]
    assert {(record.trial, record.purpose) for record in records} == {("0007", "measure")}
    first, second = records
    assert first.tokens_per_second == pytest.approx(8 * 64 / (3 * 1.1 + 2.2))  # of the median steps
    assert (second.tokens_per_second or 0) > 8 * 64 / (3 * 1.1 + 2.2), "it accumulates less"


def test_bytes_are_of_the_fullest_rank_and_host_memory_of_all_together() -> None:
    more: dict[str, Any] = {"peak_allocated": GIB // 2, "outside_torch": 2 * GIB}
    fuller = measured(peak_device=5 * GIB, alloc_retries=2, held_host=3 * GIB, **more)  # loading took 4 GiB
    measurement = there(records_of([measured(), DoneEvent(t=7)], [fuller, DoneEvent(t=7)])[0].measurement)
    assert (measurement.peak_device, measurement.outside_torch) == (5 * GIB, 2 * GIB)
    assert measurement.peak_allocated == GIB
    assert (measurement.peak_host, measurement.held_host) == (8 * GIB, 7 * GIB)
    assert measurement.alloc_retries == 2


@pytest.mark.parametrize(
    ("boundary", "accumulation", "told"),
    [(1.3, 2, True), (5.0, 2, False), (5.0, 4, True)],  # FIRST accumulates 4 times
    ids=["short optimizer", "long optimizer", "whole steps"],
)
def test_what_nvml_saw_counts_unless_the_trial_has_far_more_of_the_optimizer_than_a_training(
    boundary: float, accumulation: int, told: bool
) -> None:
    use = DeviceUse(utilisation=0.9, watts=700.0, peak_bytes=6 * GIB, others=0.4)
    event = measured(boundary_seconds=[boundary] * 3, micro_steps=accumulation)
    report: list[Event] = [event, phase("teardown", 6.0), DoneEvent(t=7.0)]
    record = only(records_of(report, report, device_use={FIRST.key: use}))
    measurement = there(record.measurement)
    assert record.warnings == ("other programs took 40% of a GPU's time meanwhile",)
    assert measurement.peak_device == 6 * GIB  # more than the ranks knew of
    assert (measurement.watts, measurement.utilisation) == (700.0 if told else None, 0.9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alloc_retries": 3}, "3 times"),
        ({"skipped_steps": 2}, "2 optimizer steps were skipped"),
        ({"compile_seconds": 41.6}, "compiling took 42 s of its first step, which is not counted"),
        ({"loader_share": 0.4}, "40% of a step waits for the script's data loader"),
        ({"peak_device": int(0.98 * LIMIT)}, "thin headroom"),
        ({"peak_device": int(0.95 * LIMIT)}, ""),
    ],
)
def test_a_fit_with_a_snag_is_a_fit_with_a_warning(changes: dict[str, Any], words: str) -> None:
    record = records_of([measured(**changes)], [measured()])[0]
    assert record.outcome.kind == "fits"
    assert len(record.warnings) == bool(words)
    assert words in "".join(record.warnings)


@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_one_ranks_oom_is_the_cause_however_early_its_peers_report_network_errors(
    culprit: int, order: tuple[int, ...]
) -> None:
    oom = failed(t=6.0 + order[culprit], bytes_asked=3 * GIB, bytes_free=512 * MIB)
    events: list[list[Event]] = [
        [measured(), oom if rank == culprit else peer_error(6.0 + order[rank])] for rank in range(3)
    ]
    exits = dict.fromkeys(sorted(range(3), key=lambda rank: order[rank]), 1)
    fits, ending = records_of(*events, exits=exits)
    assert (fits.candidate_key, fits.outcome.kind) == (FIRST.key, "fits")
    assert ending.candidate_key == SECOND.key
    outcome = ending.outcome
    assert (outcome.kind, outcome.rank, outcome.moment) == ("gpu_oom", culprit, "backward")
    assert (outcome.bytes_asked, outcome.bytes_free) == (3 * GIB, 512 * MIB)
    for words in (f"rank {culprit} ", "backward", "3.00 GiB", "0.50 GiB"):
        assert words in outcome.sentence


SILENT = Ending(kind="hang", rank=1, sentence="rank 1 was silent")
LOST = Ending(kind="lost_server", sentence="the trial server ended unexpectedly")


@pytest.mark.parametrize(
    ("events", "facts", "kind", "rank", "words"),
    [
        ([[failed("gpu_oom")], [failed("host_oom", 5.9)]], {}, "host_oom", 1, ""),
        ([[peer_error(6.5)], [peer_error(6.0)]], {"exits": {0: 1, 1: 1}}, "crash", 1, "Connection closed by peer"),
        ([[failed("unsupported")], []], {}, "unsupported", 0, "rank 0 failed in backward: RuntimeError: it failed"),
        ([[], [phase("engine")]], {"exits": {1: -9}, "killed": frozenset({0})}, "crash", 1, "rank 1"),
        (
            [[], [phase("engine")]],
            {"exits": {1: -9}, "killed": frozenset({0}), "oom_kills": 1},
            "host_oom",
            1,
            "rank 1",
        ),
        ([[], []], {"exits": {0: -signal.SIGSEGV}, "oom_kills": 1}, "crash", 0, "SIGSEGV"),
        ([[phase("warmup")], []], {"exits": {0: -signal.SIGBUS}}, "host_oom", 0, "/dev/shm"),
        ([[peer_error(6.0)], [phase("measure")]], {"exits": {0: 1, 1: -signal.SIGSEGV}}, "crash", 1, "SIGSEGV"),
        (
            [[failed()], [phase("measure")]],
            {"exits": {0: 1, 1: -9}, "killed": frozenset({1}), "oom_kills": 1},
            "gpu_oom",
            0,
            "",
        ),
        ([[failed()], [phase("measure")]], {"stop": SILENT}, "gpu_oom", 0, ""),
        (
            [[phase("measure")], [phase("measure")]],
            {"stop": LOST},
            "crash",
            None,
            "the trial server ended unexpectedly",
        ),
        ([[], []], {"exits": {0: 1, 1: 1}}, "crash", 0, "process_group"),
        ([[phase("measure")], []], {"exits": {0: 0}}, "crash", 0, "status 0"),
        ([[phase("measure")], []], {"exits": {0: 137}}, "crash", 0, "status 137"),
    ],
    ids=[
        "of two causes the earlier one",
        "a network error where nothing else is known",
        "the first line of any other failure",
        "a silent SIGKILL",
        "one that the kernel counted as for memory",
        "another death beside such a one",
        "SIGBUS is a full /dev/shm",
        "a silent death goes before the errors of its peers",
        "a rank that the launcher killed is no evidence",
        "what is found after the launcher gave up waiting",
        "a lost server is no hang and no lack of memory",
        "ranks that never wrote anything",
        "a rank that leaves without a report",
        "whatever its status",
    ],
)
def test_what_was_seen_has_one_cause(
    events: list[list[Event]], facts: dict[str, Any], kind: str, rank: int | None, words: str
) -> None:
    outcome = only(records_of(*events, **facts)).outcome
    assert (outcome.kind, outcome.rank) == (kind, rank)
    assert words in f"{outcome.sentence} in {outcome.moment}"


def test_a_cancelled_trial_keeps_what_was_measured_and_blames_nobody() -> None:
    stop = Ending(kind="cancelled", sentence="the tune was interrupted")
    fits, ending = records_of([measured(), measured(SECOND.key), failed()], [measured()], stop=stop)
    assert ending.measurement is None, "only some ranks measured it"
    assert (fits.candidate_key, fits.outcome.kind) == (FIRST.key, "fits")
    assert (ending.outcome.kind, ending.outcome.rank) == ("cancelled", None)


def test_a_failure_in_teardown_is_no_candidates_fault() -> None:
    everything = [measured(), measured(SECOND.key)]
    records = records_of([*everything, phase("teardown")], [*everything, DoneEvent(t=7)], exits={0: -signal.SIGSEGV})
    assert [record.outcome.kind for record in records] == ["fits", "fits"]


@pytest.mark.parametrize(("first_within", "blamed"), [(1.0, "third"), (100.0, "second")])
def test_a_candidate_that_was_left_out_is_not_to_blame_for_the_one_that_failed_after_it(
    first_within: float, blamed: str
) -> None:
    third = make_candidate(micro_batch=4, accumulation=1)
    second = replace(as_a_rank_sees(SECOND), first_within=first_within)
    trial = spec(1, candidates=(as_a_rank_sees(FIRST), second, as_a_rank_sees(third)))
    culprit = {"second": SECOND.key, "third": third.key}[blamed]
    run = TrialRun(spec=trial, events=[[measured(), failed(candidate=culprit)]])
    fits, ending = judge(run, WORKLOAD, (FIRST, SECOND, third))
    assert (fits.candidate_key, fits.outcome.kind) == (FIRST.key, "fits")
    assert (ending.candidate_key, ending.outcome.kind) == (culprit, "gpu_oom")


@pytest.mark.parametrize("purpose", ["proof", "probe"])
def test_what_a_proof_or_a_probe_saw_is_recorded_as_such_and_a_probe_has_no_speed(purpose: str) -> None:
    trial = spec(**{purpose: True})
    records = records_of(whole_report(), whole_report(), trial=trial)
    assert {(record.purpose, record.tokens_per_second is None) for record in records} == {(purpose, purpose == "probe")}
    assert only(records_of([failed()], [], trial=trial)).purpose == purpose


def test_a_trials_time_is_told_by_phase_of_the_slowest_rank_and_adds_up() -> None:
    quick: list[Event] = [phase("model", 2.0), phase("engine", 3.0), phase("measure", 5.0), DoneEvent(t=9.0)]
    slow: list[Event] = [phase("model", 2.0), phase("engine", 4.0), phase("measure", 5.0), DoneEvent(t=9.5)]
    run = TrialRun(spec=spec(), events=[quick, slow], requested=0.0, started=2.0, ended=10.0)
    assert trial_seconds(run) == {"start": 2.0, "model": 2.0, "engine": 2.0, "measure": 4.5, "teardown": 0.5}
    assert trial_seconds(replace(run, events=[[], []])) == {"start": 2.0, "teardown": 0.0}


@pytest.mark.parametrize(("loader_share", "is_warned"), [(None, True), (0.05, True), (0.7, False), (0.3, False)])
def test_a_proof_that_waited_for_its_data_is_not_said_to_have_been_disturbed(
    loader_share: float | None, is_warned: bool
) -> None:
    trial = make_record(FIRST, tokens_per_second=1000.0)
    proof = make_record(FIRST, tokens_per_second=300.0, measurement=make_measurement(loader_share=loader_share))
    assert bool(apart(proof, trial)) == is_warned


@pytest.mark.parametrize(
    ("steps", "speeds"),
    [
        ([2.0], (1.0,)),
        ([2.0, 2.0, 2.0, 4.0], (0.8,)),  # a training's speed includes its slow steps
        ([2.0] * 4 + [4.0] * 4, (1.0, 0.5)),
        ([2.0] * 11 + [2.2], (1.0, 1.0, 2 / 2.05)),  # one disturbed step says little
        ([2.0] * 40 + [4.0] * 10, (1.0, 1.0, 1.0, 1.0, 0.5)),
    ],
)
def test_speeds_are_means_of_up_to_five_windows_of_four_steps_or_more(
    steps: list[float], speeds: tuple[float, ...]
) -> None:
    assert window_speeds(steps, 2.0) == pytest.approx(speeds)


@pytest.mark.parametrize(
    ("windows", "trial_speed", "loader_share", "promised"),
    [
        ((0.98, 1.02), 1029.0, None, None),
        ((), None, None, None),  # a proof without a trial
        ((0.96, 1.02), None, None, (960.0, 1020.0)),
        ((0.99, 1.04), 1000.0, None, (990.0, 1040.0)),
        ((0.99, 1.01), 1400.0, None, (990.0, 1400.0)),
        ((0.99, 1.01), 700.0, None, (700.0, 1010.0)),
        ((1.0,), 1080.0, 0.08, None),  # the trial did not wait for the loader, which explains the difference
        ((1.0,), 1250.0, 0.08, (1000.0, 1150.0)),  # and here a part of it
        ((1.0,), 900.0, 0.08, (900.0, 1000.0)),  # but not that a proof is faster
        ((1.0,), 4400.0, 0.7, None),  # where the loader sets the pace, the trial says nothing
    ],
)
def test_a_range_is_promised_where_windows_or_the_trial_are_further_from_the_proof_than_three_per_cent(
    windows: tuple[float, ...],
    trial_speed: float | None,
    loader_share: float | None,
    promised: tuple[float, float] | None,
) -> None:
    seen = make_measurement(window_speeds=windows, loader_share=loader_share)
    trial = make_record(FIRST, tokens_per_second=trial_speed) if trial_speed else None
    found = promised_range(FIRST, make_record(FIRST, tokens_per_second=1000.0, measurement=seen), trial)
    assert found == (promised if promised is None else pytest.approx(promised))


def test_no_proof_of_the_answer_is_left_out_of_what_it_promises() -> None:
    slow, trial, proof = (
        make_record(FIRST, tokens_per_second=speed, purpose=purpose)
        for speed, purpose in ((238.0, "proof"), (325.0, "measure"), (372.0, "proof"))
    )
    before = proofs_before([trial, slow, proof], proof)
    assert promised_range(FIRST, proof, trial, before) == (238.0, 372.0)


@pytest.mark.parametrize(
    ("utilisation", "rung", "is_paced"),
    [(0.41, "zero2", True), (0.74, "zero2", False), (None, "zero2", False), (0.41, "zero2+opt-cpu", False)],
)
def test_a_range_is_promised_where_the_cpu_sets_the_pace_and_a_warning_says_so(
    utilisation: float | None, rung: str, is_paced: bool
) -> None:
    candidate = make_candidate(rung)
    seen = make_measurement(window_speeds=(1.0,), utilisation=utilisation)
    proof = make_record(candidate, tokens_per_second=1000.0, measurement=seen)
    assert promised_range(candidate, proof, None) == ((800.0, 1200.0) if is_paced else None)
    assert ("only 41% of the proof" in paced_by_cpu(candidate, proof)) == is_paced


@pytest.mark.parametrize(
    ("seconds", "share", "said"),
    [(0.12, 0.5, "30% of an epoch"), (0.12, 0.05, ""), (0.0, 0.5, ""), (None, None, "")],
)
def test_a_warning_says_what_new_lengths_of_batches_cost_and_how_to_have_fewer(
    seconds: float | None, share: float | None, said: str
) -> None:
    candidate = make_candidate("zero2", accumulation=4)
    seen = make_measurement(
        accumulate_seconds=0.2, boundary_seconds=0.2, new_length_seconds=seconds, new_length_share=share
    )
    warning = new_lengths(candidate, make_record(candidate, measurement=seen))
    assert (said in warning and "multiple of 64" in warning) if said else not warning
    assert not new_lengths(candidate, None)
