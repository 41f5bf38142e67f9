"""What a tune begins with, its loop over a launcher that only pretends, and how it ends when nothing fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import WORLD_SIZE, bundled_workload, make_candidate, make_record, space_on
from helpers.scripts import make_script, script_workload
from helpers.tunes import TWO_RANKS, tune_over

from ladder.backends.deepspeed.rungs import RUNGS
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.cli.main import main
from ladder.errors import EnvironmentFaultError, ModelNotAccessibleError, NothingFitsError, UsageError
from ladder.events.outcome import Outcome, Record
from ladder.events.protocol import DoneEvent, Event, FailedEvent, MeasuredEvent, TrialSpec
from ladder.events.step_policy import CandidateSpec
from ladder.events.trial_run import Ending, TrialRun
from ladder.launch.base import Deadlines, Launcher, Listener
from ladder.machine.described import Gpu, Machine
from ladder.runs.history import History
from ladder.search.decisions import Measure
from ladder.search.policy import exhaustive, walk
from ladder.search.space import Space, measured
from ladder.techniques.bf16_states import BF16_STATES
from ladder.techniques.keys import engine_in, engine_named
from ladder.tuning.answering import require_answer
from ladder.tuning.comparisons import Agreements, Comparisons
from ladder.tuning.parity import compare
from ladder.tuning.problem import micro_batches_of, run_fingerprint
from ladder.tuning.tune_events import Note, TuneEvent
from ladder.tuning.tuner import Tuner, TuneResult
from ladder.units import GIB

WORKLOAD = bundled_workload()
SEQUENCES_PER_STEP = 8


@pytest.mark.parametrize(
    ("batch", "world_size", "wanted", "expected"),
    [
        (8, 2, None, (1, 2, 4)),
        (8, 2, [], (1, 2, 4)),
        (8, 2, [4, 1, 4], (1, 4)),
        (12, 3, None, (1, 2, 4)),
        (2, 2, None, (1,)),
    ],
)
def test_micro_batches_are_the_divisors_of_a_ranks_sequences_or_the_wanted_ones(
    batch: int, world_size: int, wanted: list[int] | None, expected: tuple[int, ...]
) -> None:
    assert micro_batches_of(bundled_workload(global_batch_size=batch), world_size, wanted) == expected


@pytest.mark.parametrize(
    ("batch", "world_size", "remedy"), [(7, 2, "6 or 8"), (130, 8, "128 or 136"), (3, 8, "--global-batch-size 8,")]
)
def test_a_global_batch_that_does_not_divide_over_the_ranks_is_refused_with_its_neighbours(
    batch: int, world_size: int, remedy: str
) -> None:
    with pytest.raises(UsageError, match=remedy) as refusal:
        micro_batches_of(bundled_workload(global_batch_size=batch), world_size, None)
    assert f"{batch} sequences" in str(refusal.value)


@pytest.mark.parametrize("wanted", [3, 8, 0])
def test_a_micro_batch_that_does_not_divide_a_ranks_sequences_is_refused_with_the_possible_ones(wanted: int) -> None:
    with pytest.raises(UsageError, match=rf"--micro-batch {wanted} does not divide the 4 .* possible are 1, 2, 4\."):
        micro_batches_of(WORKLOAD, 2, [1, wanted])


def test_the_space_has_the_supported_rungs_in_the_documented_order_and_the_others_with_their_reason() -> None:
    machine = Machine(**{**vars(TWO_RANKS), "unsupported": {"zero3": "no luck", "zero1": "not asked for"}})
    wanted = [RUNGS_BY_NAME[name] for name in ("zero3", "zero2", "zero0")]
    space, unsupported = space_on(WORKLOAD, machine, wanted, (1, 2, 4))
    assert [engine.key for engine in space.engines] == ["zero0", "zero2"]
    assert unsupported == {RUNGS_BY_NAME["zero3"]: "no luck"}
    assert len(space.candidates) == 2 * 2 * 3
    assert all(candidate.micro_batch * candidate.accumulation * WORLD_SIZE == 8 for candidate in space.candidates)


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_limit": 2 * GIB},
        {"world_size": 4},
        {"num_cores": 64},
        {"device": "cuda", "gpus": (Gpu("GPU-a", "NVIDIA H200", GIB),)},
    ],
)
def test_a_history_is_good_for_one_machine_only(changes: dict[str, Any]) -> None:
    other = Machine(**vars(TWO_RANKS) | changes)
    versions = {"torch": "2.13", "python": "3.11"}
    assert run_fingerprint(WORKLOAD, other, versions)[0] != run_fingerprint(WORKLOAD, TWO_RANKS, versions)[0]


def test_a_history_is_good_for_one_set_of_versions_and_any_python() -> None:
    def digest(**versions: str) -> str:
        return run_fingerprint(WORKLOAD, TWO_RANKS, versions)[0]

    assert digest(torch="2.13", python="3.11") == digest(torch="2.13", python="3.12")
    assert digest(torch="2.13") != digest(torch="2.14")


class Pretender(Launcher):
    """A launcher without processes: what becomes of each candidate is the function's to say."""

    def __init__(self, seconds: Callable[[TrialSpec, CandidateSpec], float | None]) -> None:
        self._seconds = seconds
        self.specs: list[TrialSpec] = []

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        Path(spec.folder).mkdir(parents=True)
        self.specs.append(spec)
        events: list[Event] = []
        for candidate in spec.candidates:
            seconds = self._seconds(spec, candidate)
            if seconds is None:
                oom = FailedEvent(t=1, candidate=candidate.key, outcome="gpu_oom", moment="forward", message="OOM")
                return TrialRun(spec=spec, events=[[*events, oom], events])
            events.append(measured_in(candidate, seconds))
        return TrialRun(spec=spec, events=[[*events, DoneEvent(t=2)]] * spec.world_size)

    def close(self) -> None:
        """There is nothing to end."""


def measured_in(candidate: CandidateSpec, seconds: float) -> MeasuredEvent:
    """Measured so that one optimizer step takes `seconds` in all."""
    return MeasuredEvent(
        t=1,
        candidate=candidate.key,
        began=0,
        accumulate_seconds=[seconds / candidate.accumulation],
        boundary_seconds=[seconds / candidate.accumulation],
        skipped_steps=0,
        peak_allocated=1,
        peak_reserved=1,
        peak_device=1,
        outside_torch=0,
        peak_host=1,
        alloc_retries=0,
        losses=[],
    )


def tune(folder: Path, launcher: Launcher, *, strategy: Any = exhaustive, **options: Any) -> TuneResult:
    return tune_over(launcher, folder, WORKLOAD, strategy=strategy, **options)


def larger_is_faster(spec: TrialSpec, candidate: CandidateSpec) -> float | None:
    """zero1 holds micro-batch 2 at most; zero2 is slower and holds everything."""
    if candidate.key.startswith("zero1"):
        return None if candidate.micro_batch > 2 else 10.0 / candidate.micro_batch
    return 12.0 / candidate.micro_batch


def test_the_answer_is_the_fastest_that_fits_and_not_the_first(tmp_path: Path) -> None:
    launcher = Pretender(larger_is_faster)
    result = tune(tmp_path / "run", launcher)
    assert result.answer is not None
    assert result.answer.candidate_key.startswith("zero2")
    assert result.answer.candidate_key.endswith("mb=4")
    assert result.answer.purpose == "proof"
    assert [spec.trial for spec in launcher.specs] == [f"{index + 1:04d}" for index in range(len(launcher.specs))]
    proofs = [spec for spec in launcher.specs if spec.proof]
    assert [len(spec.candidates) for spec in proofs] == [1] * len(proofs)
    assert not result.cancelled


def test_an_engines_candidates_share_a_trial_and_the_global_batch_stays_as_asked(tmp_path: Path) -> None:
    launcher = Pretender(larger_is_faster)
    tune(tmp_path / "run", launcher)
    assert len(launcher.specs[0].candidates) > 1
    for candidate in itertools.chain.from_iterable(spec.candidates for spec in launcher.specs):
        assert candidate.micro_batch * candidate.accumulation * WORLD_SIZE == SEQUENCES_PER_STEP


def test_a_winner_whose_proof_fails_makes_way_for_the_next(tmp_path: Path) -> None:
    def fails_its_proof(spec: TrialSpec, candidate: CandidateSpec) -> float | None:
        return None if spec.proof and candidate.micro_batch == 4 else larger_is_faster(spec, candidate)

    result = tune(tmp_path / "run", Pretender(fails_its_proof))
    assert result.answer is not None
    assert result.answer.candidate_key.startswith("zero1")
    assert result.answer.candidate_key.endswith("mb=2")


def test_a_winner_whose_first_proof_was_disturbed_is_the_answer_at_the_speed_of_its_second(tmp_path: Path) -> None:
    proofs: list[str] = []

    def is_disturbed_once(spec: TrialSpec, candidate: CandidateSpec) -> float | None:
        proofs.extend([candidate.key] * spec.proof)
        seconds = larger_is_faster(spec, candidate)
        return 2 * seconds if seconds and spec.proof and len(proofs) == 1 else seconds

    usual = tune(tmp_path / "usual", Pretender(larger_is_faster)).answer
    found = tune(tmp_path / "disturbed", Pretender(is_disturbed_once)).answer
    assert usual is not None
    assert found is not None
    assert (found.candidate_key, found.tokens_per_second) == (usual.candidate_key, usual.tokens_per_second)
    assert proofs == [usual.candidate_key] * 2


def test_a_finished_tune_started_again_runs_no_trial(tmp_path: Path) -> None:
    first = tune(tmp_path / "run", Pretender(larger_is_faster))
    launcher = Pretender(larger_is_faster)
    assert tune(tmp_path / "run", launcher).answer == first.answer
    assert launcher.specs == []


def test_the_walk_stops_at_the_first_step_that_fits(tmp_path: Path) -> None:
    result = tune(tmp_path / "run", Pretender(larger_is_faster), strategy=walk)
    assert result.answer is not None
    assert result.answer.candidate_key == "zero1 ckpt=off mb=1"


def test_an_interrupted_tune_proves_nothing_and_goes_on_where_it_was(tmp_path: Path) -> None:
    launcher = Pretender(larger_is_faster)
    result = tune(tmp_path / "run", launcher, cancelled=lambda: len(launcher.specs) >= 1)
    assert result.cancelled
    assert result.answer is None
    assert result.best_so_far is not None
    again = Pretender(larger_is_faster)
    tried = {record.candidate_key for record in result.records}
    assert tune(tmp_path / "run", again).answer is not None
    measured_again = {candidate.key for spec in again.specs if not spec.proof for candidate in spec.candidates}
    assert not tried & measured_again


def test_a_spent_time_budget_ends_the_search_and_the_best_is_proven_all_the_same(tmp_path: Path) -> None:
    tune(tmp_path / "run", Pretender(larger_is_faster), cancelled=iter([False, True, True, True, True]).__next__)
    result = tune(tmp_path / "run", launcher := Pretender(larger_is_faster), time_budget=0.0)
    assert "time budget" in result.stopped
    assert [spec.proof for spec in launcher.specs] == [True] * len(launcher.specs)
    assert result.answer is not None


@pytest.mark.parametrize(("gain", "kept"), [(0.5, True), (0.99, False)])
def test_knobs_that_gain_more_than_noise_are_in_the_answer_and_others_are_not(
    tmp_path: Path, gain: float, kept: bool
) -> None:
    def unpipelined_is_faster(spec: TrialSpec, candidate: CandidateSpec) -> float | None:
        seconds = larger_is_faster(spec, candidate)
        overlaps = spec.deepspeed["zero_optimization"]["overlap_comm"]
        return seconds if seconds is None or overlaps else gain * seconds

    launcher = Pretender(unpipelined_is_faster)
    result = tune(tmp_path / "run", launcher, knob_trials=6)
    assert result.answer is not None
    assert ("overlap_comm=False" in result.answer.candidate_key) == kept
    assert result.best_so_far is not None
    assert result.best_so_far.candidate_key == result.answer.candidate_key
    assert sum("[" in record.candidate_key for record in result.records if record.purpose == "measure") == 6
    again = Pretender(unpipelined_is_faster)
    assert tune(tmp_path / "run", again, knob_trials=6).answer == result.answer
    assert again.specs == []


class Learner(Pretender):
    """Losses fall in its parity trials, but those of the zero2 engine, which is faster at each micro-batch."""

    def __init__(self, zero2_losses: list[float]) -> None:
        super().__init__(lambda spec, candidate: 4.0 / candidate.micro_batch if "zero2" in candidate.key else 5.0)
        self._zero2_losses = zero2_losses

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        run = super().run(spec, deadlines, listener)
        losses = self._zero2_losses if spec.candidates[0].key.startswith("zero2") else [9.0, 8.0, 7.0]
        told = [
            event.model_copy(update={"losses": losses}) if isinstance(event, MeasuredEvent) else event
            for event in run.events[0]
        ]
        run.events = [told] * spec.world_size
        return run


@pytest.mark.parametrize(
    ("losses", "rung", "warns"),
    [
        ([9.0, 8.01, 7.01], "zero2", False),
        ([9.0, 9.0, 9.0], "zero1", False),
        ([9.0, float("nan"), 7.0], "zero1", False),
        ([], "zero2", True),
    ],
)
def test_what_does_not_train_like_the_plain_rung_is_not_the_answer(
    tmp_path: Path, losses: list[float], rung: str, warns: bool
) -> None:
    launcher = Learner(losses)
    result = tune(tmp_path / "run", launcher, comparisons=Comparisons())
    assert result.answer is not None
    assert result.answer.candidate_key.startswith(rung)
    assert any("losses were not compared" in warning for warning in result.answer.warnings) == warns
    shallow = [spec for spec in launcher.specs if spec.parity]
    with History(tmp_path / "run", "abc", {}) as history:
        assert {spec.trial for spec in shallow} < set(history.trial_seconds(history.records))
    compared = [candidate.key for spec in shallow for candidate in spec.candidates]
    assert all(key.endswith(" mb=1") for key in compared)
    assert {candidate.beat_step_seconds for spec in shallow for candidate in spec.candidates} == {None}
    assert len(compared) == len(set(compared)), "what holds at one micro-batch holds at the others"
    assert all(record.trial not in {spec.trial for spec in shallow} for record in result.records if record.measurement)
    again = Learner(losses)
    assert tune(tmp_path / "run", again, comparisons=Comparisons()).answer == result.answer
    assert again.specs == []


@pytest.mark.parametrize(
    ("losses", "memory_limit", "torch", "made"),
    [
        ([9.0, 8.0, 7.0], 1, "2.11.0", 0),
        ([9.0, 8.0, 7.0], 2, "2.11.0", 0),
        ([9.0, 8.0, 7.0], 1, "2.12.0", 2),
        ([9.0, 9.0, 9.0], 1, "2.11.0", 2),
    ],
)
def test_losses_that_agreed_in_an_earlier_tune_with_the_same_libraries_are_not_compared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float], memory_limit: int, torch: str, made: int
) -> None:
    monkeypatch.setenv("LADDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ladder.tuning.comparisons.package_versions", lambda _: {"torch": torch})
    comparisons = Comparisons(agreements=Agreements(machine=TWO_RANKS))
    tune(tmp_path / "first", Learner(losses), comparisons=comparisons)
    monkeypatch.setattr("ladder.tuning.comparisons.package_versions", lambda _: {"torch": "2.11.0"})
    again = Learner([9.0, 8.0, 7.0])
    machine = replace(TWO_RANKS, memory_limit=TWO_RANKS.memory_limit * memory_limit)
    comparisons = Comparisons(agreements=Agreements(machine=machine))
    result = tune_over(
        again, tmp_path / "again", WORKLOAD, strategy=exhaustive, machine=machine, comparisons=comparisons
    )
    assert result.answer is not None
    assert len([spec for spec in again.specs if spec.parity]) == made


def test_a_comparison_that_its_server_did_not_survive_is_made_again(tmp_path: Path) -> None:
    class Losing(Learner):
        """Its server dies in the first comparison."""

        def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
            run = super().run(spec, deadlines, listener)
            if [each.parity for each in self.specs].count(True) == 1 and spec.parity:
                run.events, run.stop = (
                    [[], []],
                    Ending(kind="lost_server", sentence="the trial server ended unexpectedly"),
                )
            return run

    result = tune(tmp_path / "run", Losing([9.0, 9.0, 9.0]), comparisons=Comparisons())
    assert result.answer is not None
    assert result.answer.candidate_key.startswith("zero1"), "zero2 loses its steps, as the second comparison shows"


def test_trials_that_end_without_a_result_end_the_tune(tmp_path: Path) -> None:
    class Silent(Pretender):
        def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
            run = super().run(spec, deadlines, listener)
            run.events = [[DoneEvent(t=2)]] * spec.world_size
            return run

    with pytest.raises(EnvironmentFaultError, match=r"The trial ended without a result \(3 times in a row\)"):
        tune(tmp_path / "run", Silent(larger_is_faster))


def test_a_comparison_after_which_the_machine_is_in_no_state_for_trials_ends_the_tune(tmp_path: Path) -> None:
    class Spoiler(Learner):
        def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
            run = super().run(spec, deadlines, listener)
            if spec.parity:
                run.stop = Ending(kind="environment", sentence="40 GiB of GPU memory are still held")
            return run

    launcher = Spoiler([9.0, 8.0, 7.0])
    with pytest.raises(EnvironmentFaultError, match="still held"):
        tune(tmp_path / "run", launcher, comparisons=Comparisons())
    assert launcher.specs[-1].parity


def test_losses_are_held_against_those_of_the_plain_rung_with_the_same_states(tmp_path: Path) -> None:
    """Both come to a proof: what has its states in bf16 is faster in its trial, and slower in its proof."""

    class Both(Pretender):
        def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
            run = super().run(spec, deadlines, listener)
            losses = [9.0, 6.0] if "states" in spec.candidates[0].key else [9.0, 5.0]
            told = [
                event.model_copy(update={"losses": losses}) if isinstance(event, MeasuredEvent) else event
                for event in run.events[0]
            ]
            run.events = [told] * spec.world_size
            return run

    def seconds(spec: TrialSpec, candidate: CandidateSpec) -> float:
        return 5.0 if "states" not in candidate.key else 8.0 if spec.proof else 4.0

    launcher = Both(seconds)
    space, _ = space_on(WORKLOAD, TWO_RANKS, [RUNGS_BY_NAME["zero2"]], (1,), techniques=[BF16_STATES])
    with History(tmp_path / "run", "abc", {}) as history:
        tuner = Tuner(
            workload=WORKLOAD,
            machine=TWO_RANKS,
            space=space,
            unsupported={},
            history=history,
            launcher=launcher,
            comparisons=Comparisons(),
        )
        result = tuner.tune(exhaustive)
    assert result.answer is not None
    assert result.answer.candidate_key.startswith("zero2 ")
    assert {engine_in(spec.candidates[0].key).key for spec in launcher.specs if spec.parity} == {
        "zero1",
        "zero1+bf16-states",
        "zero2",
        "zero2+bf16-states",
    }


def test_losses_that_would_not_show_a_lost_step_are_not_said_to_agree() -> None:
    found = compare([9.0, 8.95], [9.0, 8.95], make_candidate("zero2").engine)
    assert found.agrees is None
    assert "those of zero1 did not fall" in found.sentence


def test_an_engine_that_takes_no_step_is_found_out_however_little_the_losses_fall() -> None:
    engine = make_candidate("zero2").engine
    assert compare([9.0, 8.9], [9.0, 8.9], engine).agrees
    assert compare([9.0, 9.0], [9.0, 8.9], engine).agrees is False


@pytest.mark.parametrize(("key", "most"), [("ddp", 0.02), ("ddp+fp8", 0.05), ("ddp+compile+fp8", 0.05)])
def test_losses_may_differ_by_as_much_as_an_engine_s_techniques_round(key: str, most: float) -> None:
    engine = engine_named(key)
    assert compare([10.0, 5.0 + 9.9 * most], [10.0, 5.0], engine).agrees
    assert compare([10.0, 5.0 + 10.1 * most], [10.0, 5.0], engine).agrees is False
    assert compare([10.0, 10.0], [10.0, 5.0], engine).agrees is False


@pytest.mark.parametrize(("key", "agrees"), [("ddp", False), ("ddp+fp8", True)])
def test_of_an_engine_that_rounds_losses_are_compared_until_they_have_halved(key: str, agrees: bool) -> None:
    swinging = [10.0, 8.0, 4.9, 2.0]
    assert compare([10.0, 8.0, 4.9, 3.5], swinging, engine_named(key)).agrees is agrees
    assert compare([10.0, 8.0, 6.5, 3.5], swinging, engine_named(key)).agrees is False


@pytest.mark.parametrize(("factor", "words"), [(0.8, "25% faster"), (1.25, "20% slower"), (1.05, "")])
def test_a_proof_at_another_speed_than_the_trial_says_how_far_speeds_vary(
    tmp_path: Path, factor: float, words: str
) -> None:
    launcher = Pretender(lambda spec, candidate: factor if spec.proof else 1.0)
    answer = tune(tmp_path / "run", launcher).answer
    assert answer is not None
    assert [warning for warning in answer.warnings if "than its trial" in warning] == (
        [
            f"its proof was {words} than its trial, so its speed is promised as a range, and smaller differences "
            "between candidates here may be noise"
        ]
        if words
        else []
    )


class Slow(Pretender):
    """Each trial takes a minute on a clock of its own."""

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        run = super().run(spec, deadlines, listener)
        run.ended = 60.0
        return run

    def now(self) -> float:
        return 60.0 * len(self.specs)


def test_the_budget_is_counted_on_the_launchers_clock_and_its_end_says_what_was_left_open(tmp_path: Path) -> None:
    launcher = Slow(lambda spec, candidate: 1.0)
    result = tune(tmp_path / "run", launcher, strategy=one_by_one, time_budget=200.0, clock=launcher.now)
    assert [spec.proof for spec in launcher.specs] == [False, False, True]  # a third trial's proof would end at 240 s
    assert result.out_of_time
    assert result.seconds == 60.0 * len(launcher.specs)
    assert "of the time budget of 200 s, no time is left to try zero" in result.stopped


def test_while_nothing_fits_the_next_candidate_is_tried_even_if_its_proof_ends_too_late(tmp_path: Path) -> None:
    launcher = Slow(lambda spec, candidate: None if "zero1" in candidate.key else 1.0)
    told: list[TuneEvent] = []
    strategy = first_of_each_engine
    result = tune(tmp_path / "run", launcher, strategy=strategy, time_budget=70.0, clock=launcher.now, tell=told.append)
    assert result.answer is not None
    assert [spec.proof for spec in launcher.specs] == [False, False, True]
    assert not [event for event in told if isinstance(event, Note) and "Warning" in event.text]
    assert "over the budget" in result.stopped


def first_of_each_engine(space: Space, records: Sequence[Record]) -> Measure:
    tried = {space.by_key[key].engine for key in measured(records)}
    engine = next((each for each in space.engines if each not in tried), space.engines[0])
    return Measure(engine, space.of_engine(engine)[:1], "the next engine")


def one_by_one(space: Space, records: Sequence[Record]) -> Measure:
    left = [each for each in space.candidates if each.key not in measured(records)]
    return Measure(left[0].engine, (left[0],), "the next one")


def test_a_budget_below_one_trial_is_warned_of_and_ends_with_what_to_do(tmp_path: Path) -> None:
    launcher = Slow(lambda spec, candidate: None)
    told: list[TuneEvent] = []
    result = tune(tmp_path / "run", launcher, time_budget=0.5, clock=launcher.now, tell=told.append)
    assert len(launcher.specs) == 1
    notes = [event.text for event in told if isinstance(event, Note)]
    assert "more than the time budget of 0.5 s allows" in notes[0]
    with pytest.raises(UsageError, match="larger --time-budget"):
        require_answer(result)


@pytest.mark.parametrize(
    ("moment", "error", "words"),
    [("model", ModelNotAccessibleError, "cannot build this model"), ("forward", NothingFitsError, "None ran out of")],
)
def test_where_no_failure_was_for_memory_no_memory_is_recommended(
    tmp_path: Path, moment: str, error: type[Exception], words: str
) -> None:
    class Broken(Pretender):
        def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
            run = super().run(spec, deadlines, listener)
            failed = FailedEvent(t=0.0, candidate=None, outcome="crash", moment=moment, message="KeyError: 'nosuch'")
            run.events = [[failed]] * spec.world_size
            return run

    result = tune(tmp_path / "run", Broken(larger_is_faster))
    with pytest.raises(error, match=words) as refusal:
        require_answer(result)
    assert "What would fit" not in str(refusal.value)


@pytest.mark.parametrize("moment", ["model", "warmup"])
def test_a_script_that_never_came_to_be_measured_is_told_why_and_where_its_output_is(moment: str) -> None:
    space, _ = space_on(script_workload(make_script()), TWO_RANKS, RUNGS[:1], (1,))
    sentence = f"rank 1 failed in {moment}: KeyError: 'nosuch'"
    crash = Outcome(kind="crash", sentence=sentence, moment=moment, rank=1)
    result = TuneResult(
        space=space,
        unsupported={},
        records=[make_record(make_candidate("zero0"), "crash", outcome=crash)],
        answer=None,
        best_so_far=None,
        stopped="",
        cancelled=False,
        seconds=1.0,
    )
    with pytest.raises(UsageError) as refusal:
        require_answer(result)
    assert str(refusal.value) == (
        f"The script failed before its training was measured: {sentence} (its output is in "
        "trials/0001/rank1.log of the run folder)."
    )
    for other in (make_record(make_candidate("zero1"), "gpu_oom"), make_record(make_candidate("zero1"))):
        with pytest.raises(NothingFitsError):
            require_answer(replace(result, records=[*result.records, other]))


class Failing(Pretender):
    """The proofs of some engines end by an error of the script's evaluation, on whichever rank."""

    def __init__(self, *engines: str, message: str = "ValueError: no such metric") -> None:
        super().__init__(larger_is_faster)
        self._engines, self._message = engines, message

    @property
    def proofs(self) -> list[str]:
        return [spec.candidates[0].key for spec in self.specs if spec.proof]

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        run = super().run(spec, deadlines, listener)
        key = spec.candidates[0].key
        if spec.proof and key.startswith(self._engines):
            error = self._message.format(key=key)
            failed = FailedEvent(t=2, candidate=key, outcome="crash", moment="evaluation", message=error)
            run.events = [[failed], []] if len(self.proofs) % 2 else [[], [failed]]
        return run


def tune_script(folder: Path, launcher: Launcher, **options: Any) -> TuneResult:
    workload = script_workload(make_script(), global_batch_size=SEQUENCES_PER_STEP)
    return tune_over(launcher, folder, workload, strategy=exhaustive, **options)


def test_a_script_that_fails_alike_in_the_proofs_of_two_engines_is_told_so_and_no_third_is_tried(
    tmp_path: Path,
) -> None:
    launcher = Failing("zero1", "zero2")
    result = tune_script(tmp_path / "run", launcher)
    assert [key.split()[0] for key in launcher.proofs] == ["zero2", "zero2", "zero1"]
    with pytest.raises(UsageError) as refusal:
        require_answer(result)
    assert str(refusal.value) == (
        f"The script's own evaluation failed in the proof of {launcher.proofs[-1]}: rank 0 failed in evaluation: "
        f"ValueError: no such metric (its output is in trials/{launcher.specs[-1].trial}/rank0.log of the run folder). "
        "Its trials fit in memory: mend the script, and start the same command again."
    )


def test_a_script_that_fails_on_one_engine_only_is_proven_on_another(tmp_path: Path) -> None:
    result = tune_script(tmp_path / "run", launcher := Failing("zero2"))
    assert result.answer is not None
    assert result.answer.candidate_key.startswith("zero1")
    assert {key.split()[0] for key in launcher.proofs} == {"zero1", "zero2"}


def test_where_there_is_one_engine_two_failures_alike_are_enough_and_unlike_ones_are_not(tmp_path: Path) -> None:
    one = {"rungs": [RUNGS_BY_NAME["zero2"]]}
    tune_script(tmp_path / "alike", alike := Failing("zero2"), **one)
    assert len(alike.proofs) == 2
    tune_script(tmp_path / "unlike", unlike := Failing("zero2", message="ValueError: at {key}"), **one)
    assert len(unlike.proofs) > 2


def test_a_script_that_was_mended_is_proven_by_the_next_start(tmp_path: Path) -> None:
    tune_script(tmp_path / "run", Failing("zero1", "zero2"))
    mended = tune_script(tmp_path / "run", launcher := Failing("none"))
    assert mended.answer is not None
    assert mended.answer.candidate_key.startswith("zero2")
    assert launcher.proofs == [mended.answer.candidate_key]


class Dying(Pretender):
    """Its trial server dies in every trial."""

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        run = super().run(spec, deadlines, listener)
        run.events = [[], []]
        run.stop = Ending(kind="lost_server", sentence="the trial server ended unexpectedly")
        return run


def test_a_server_that_dies_again_and_again_ends_the_tune_and_blames_no_candidate(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFaultError, match=r"The trial server ended unexpectedly \(3 times in a row\)"):
        tune(tmp_path / "run", Dying(larger_is_faster))
    with History(tmp_path / "run", "abc", {}) as history:
        assert history.records == []


class Unconnected(Pretender):
    """Its ranks find no network interface to meet on, in the first `times` trials."""

    def __init__(self, times: int) -> None:
        super().__init__(larger_is_faster)
        self._times = times

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        run = super().run(spec, deadlines, listener)
        if len(self.specs) <= self._times:
            message = "RuntimeError: Unable to find address for: ib0"
            failure = FailedEvent(t=1, candidate=None, outcome="crash", moment="process_group", message=message)
            run.events = [[failure], []]
        return run


def test_ranks_that_cannot_meet_end_the_tune_and_blame_no_engine(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFaultError, match=r"Unable to find address for: ib0 \(3 times in a row\)"):
        tune(tmp_path / "run", Unconnected(3))
    with History(tmp_path / "run", "abc", {}) as history:
        assert history.records == []


def test_ranks_that_could_not_meet_once_are_tried_again(tmp_path: Path) -> None:
    found, usual = (tune(tmp_path / str(times), Unconnected(times), strategy=exhaustive).answer for times in (2, 0))
    assert found is not None
    assert usual is not None
    assert found.candidate_key == usual.candidate_key


def test_weights_of_an_answer_that_was_proven_before_are_saved_all_the_same(tmp_path: Path) -> None:
    first = tune(tmp_path / "run", Pretender(larger_is_faster))
    again = Pretender(larger_is_faster)
    saved = tune(tmp_path / "run", again, save_folder=tmp_path / "weights")
    assert first.answer is not None
    assert saved.answer is not None
    assert saved.answer.candidate_key == first.answer.candidate_key
    assert [spec.save_folder for spec in again.specs] == [str(tmp_path / "weights")]


def test_a_folder_for_the_weights_that_cannot_be_is_refused_before_any_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    folders = ["--run-dir", str(tmp_path / "run"), "--output", str(tmp_path / "b.json")]
    command = ["tune", "tiny-llama", "--gpus", "0", *folders, "--save-weights", str(tmp_path / "file" / "weights")]
    assert main(command) == 4
    assert "--save-weights" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("kind", "moment"), [("disk_full", "gather"), ("crash", "gather")])
def test_weights_that_cannot_be_saved_end_the_tune_and_the_answer_stays(tmp_path: Path, kind: Any, moment: str) -> None:
    class Unsaved(Pretender):
        def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
            run = super().run(spec, deadlines, listener)
            if spec.save_folder:
                failed = FailedEvent(t=2, candidate=None, outcome=kind, moment=moment, message="OSError: no space left")
                run.events, run.exits = [[failed]] * spec.world_size, {0: 1, 1: 1}
            return run

    first = tune(tmp_path / "run", Pretender(larger_is_faster))
    launcher = Unsaved(larger_is_faster)
    with pytest.raises(EnvironmentFaultError, match=r"The weights were not saved: .*choose another --save-weights"):
        tune(tmp_path / "run", launcher, save_folder=tmp_path / "weights")
    assert len(launcher.specs) == 1
    assert tune(tmp_path / "run", Pretender(larger_is_faster)).answer == first.answer


def test_weights_whose_proof_was_a_false_start_are_saved_by_the_next(tmp_path: Path) -> None:
    class LostOnce(Pretender):
        def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
            run = super().run(spec, deadlines, listener)
            if len(self.specs) == 1:
                run.events, run.stop = (
                    [[], []],
                    Ending(kind="lost_server", sentence="the trial server ended unexpectedly"),
                )
            return run

    tune(tmp_path / "run", Pretender(larger_is_faster))
    launcher = LostOnce(larger_is_faster)
    tune(tmp_path / "run", launcher, save_folder=tmp_path / "weights")
    assert [spec.save_folder for spec in launcher.specs] == [str(tmp_path / "weights")] * 2


class Unplugged(Pretender):
    """The machine fails under the second candidate of every trial."""

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        run = super().run(spec, deadlines, listener)
        fault = FailedEvent(
            t=1,
            candidate=spec.candidates[1].key,
            outcome="crash",
            moment="backward",
            message="CUDA error: unknown error",
        )
        run.events = [[events[0], fault] for events in run.events]
        run.stop = Ending(kind="environment", sentence="GPU 0 has fallen off the bus.")
        return run


def test_a_fault_of_the_machine_ends_the_tune_keeps_what_was_measured_and_blames_no_candidate(tmp_path: Path) -> None:
    launcher = Unplugged(larger_is_faster)
    with pytest.raises(EnvironmentFaultError, match="fallen off the bus"):
        tune(tmp_path / "run", launcher)
    (spec,) = launcher.specs
    with History(tmp_path / "run", "abc", {}) as history:
        assert [(r.candidate_key, r.outcome.kind) for r in history.records] == [(spec.candidates[0].key, "fits")]


def test_when_nothing_fits_the_sentence_says_what_the_most_frugal_one_lacked() -> None:
    space, _ = space_on(WORKLOAD, TWO_RANKS, RUNGS[:1], (1,))
    oom = Outcome(kind="gpu_oom", sentence="rank 1 ran out of GPU memory", moment="engine")
    result = TuneResult(
        space=replace(space, device="cuda"),
        unsupported={},
        records=[make_record(make_candidate("zero0"), "gpu_oom", outcome=oom)],
        answer=None,
        best_so_far=None,
        stopped="",
        cancelled=False,
        seconds=1.0,
    )
    with pytest.raises(NothingFitsError, match=r"in 1\.00 GiB per GPU.*rank 1 ran out of GPU memory\. What would fit"):
        require_answer(result)
    on_cpu = replace(result, space=replace(result.space, device="cpu"))
    with pytest.raises(NothingFitsError, match=r"in 1\.00 GiB per CPU rank: 1 candidate failed"):
        require_answer(on_cpu)
