"""What a tune begins with, its loop over a launcher that only pretends, and how it ends when nothing fits."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import WORLD_SIZE, bundled_workload, make_candidate, make_record, space_on, there
from helpers.events import measured_event
from helpers.scripts import make_script, script_workload
from helpers.tunes import TWO_RANKS, tune_over

from ladder.backends.deepspeed.rungs import RUNGS
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.cli.main import main
from ladder.errors import EnvironmentFaultError, ModelNotAccessibleError, NothingFitsError, UsageError
from ladder.events.outcome import Outcome, Record
from ladder.events.protocol import DoneEvent, Event, FailedEvent, MeasuredEvent, PhaseEvent, TrialSpec
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
from ladder.tuning.parity import Agreements, Comparisons, compare
from ladder.tuning.problem import micro_batches_of, run_fingerprint
from ladder.tuning.tune_events import Note, TuneEvent
from ladder.tuning.tuner import TuneResult
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
    for wanted in (3, 8, 0):
        with pytest.raises(
            UsageError, match=rf"--micro-batch {wanted} does not divide the 4 .* possible are 1, 2, 4\."
        ):
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
def test_a_history_is_good_for_one_machine_one_set_of_versions_and_any_python(changes: dict[str, Any]) -> None:
    other = Machine(**vars(TWO_RANKS) | changes)
    versions = {"torch": "2.13", "python": "3.11"}
    assert run_fingerprint(WORKLOAD, other, versions)[0] != (usual := run_fingerprint(WORKLOAD, TWO_RANKS, versions)[0])
    assert run_fingerprint(WORKLOAD, TWO_RANKS, {"torch": "2.13", "python": "3.12"})[0] == usual
    assert run_fingerprint(WORKLOAD, TWO_RANKS, {"torch": "2.14", "python": "3.11"})[0] != usual


class Pretender(Launcher):
    """A launcher without processes: what becomes of each candidate is a function's to say, of the run another's."""

    def __init__(
        self,
        seconds: Callable[[TrialSpec, CandidateSpec], float | None],
        then: Callable[[TrialRun], object] = lambda run: None,
    ) -> None:
        self._seconds, self._then = seconds, then
        self.specs: list[TrialSpec] = []

    @property
    def proofs(self) -> list[str]:
        return [spec.candidates[0].key for spec in self.specs if spec.proof]

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        Path(spec.folder).mkdir(parents=True)
        self.specs.append(spec)
        run = self._played(spec)
        self._then(run)
        return run

    def _played(self, spec: TrialSpec) -> TrialRun:
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
    each = [seconds / candidate.accumulation]
    return measured_event(candidate.key, accumulate_seconds=each, boundary_seconds=each)


def fails(run: TrialRun, moment: str, message: str, *, kind: Any = "crash", candidate: str | None = None) -> None:
    """Have rank 0 end in this way."""
    failure = FailedEvent(t=2, candidate=candidate, outcome=kind, moment=moment, message=message)
    run.events = [[failure], []]


def loses_its_server(run: TrialRun) -> None:
    run.events, run.stop = [[], []], Ending(kind="lost_server", sentence="the trial server ended unexpectedly")


def tune(folder: Path, launcher: Launcher, *, strategy: Any = exhaustive, **options: Any) -> TuneResult:
    return tune_over(launcher, folder, WORKLOAD, strategy=strategy, **options)


def answer_of(result: TuneResult) -> Record:
    return there(result.answer)


def larger_is_faster(spec: TrialSpec, candidate: CandidateSpec) -> float | None:
    """zero1 holds micro-batch 2 at most; zero2 is slower and holds everything."""
    if candidate.key.startswith("zero1"):
        return None if candidate.micro_batch > 2 else 10.0 / candidate.micro_batch
    return 12.0 / candidate.micro_batch


def test_the_answer_is_the_fastest_that_fits_and_each_trial_is_of_one_engine_with_the_batch_that_was_asked_for(
    tmp_path: Path,
) -> None:
    launcher = Pretender(larger_is_faster)
    result = tune(tmp_path / "run", launcher)
    answer = answer_of(result)
    assert answer.candidate_key.startswith("zero2")
    assert answer.candidate_key.endswith("mb=4")
    assert (answer.purpose, result.cancelled) == ("proof", False)
    assert [spec.trial for spec in launcher.specs] == [f"{index + 1:04d}" for index in range(len(launcher.specs))]
    assert {len(spec.candidates) for spec in launcher.specs if spec.proof} == {1}
    assert len(launcher.specs[0].candidates) > 1
    for candidate in itertools.chain.from_iterable(spec.candidates for spec in launcher.specs):
        assert candidate.micro_batch * candidate.accumulation * WORLD_SIZE == SEQUENCES_PER_STEP


def test_a_winner_whose_proof_fails_makes_way_for_the_next(tmp_path: Path) -> None:
    def fails_its_proof(spec: TrialSpec, candidate: CandidateSpec) -> float | None:
        return None if spec.proof and candidate.micro_batch == 4 else larger_is_faster(spec, candidate)

    answer = answer_of(tune(tmp_path / "run", Pretender(fails_its_proof)))
    assert (answer.candidate_key.split()[0], answer.candidate_key.split()[-1]) == ("zero1", "mb=2")


def test_a_winner_whose_first_proof_was_disturbed_is_the_answer_at_the_speed_of_its_second(tmp_path: Path) -> None:
    def is_disturbed_once(spec: TrialSpec, candidate: CandidateSpec) -> float | None:
        seconds = larger_is_faster(spec, candidate)
        return 2 * seconds if seconds and spec.proof and len(disturbed.proofs) == 1 else seconds

    disturbed = Pretender(is_disturbed_once)
    usual = answer_of(tune(tmp_path / "usual", Pretender(larger_is_faster)))
    found = answer_of(tune(tmp_path / "disturbed", disturbed))
    assert (found.candidate_key, found.tokens_per_second) == (usual.candidate_key, usual.tokens_per_second)
    assert disturbed.proofs == [usual.candidate_key] * 2


def test_the_walk_stops_at_the_first_step_that_fits(tmp_path: Path) -> None:
    result = tune(tmp_path / "run", Pretender(larger_is_faster), strategy=walk)
    assert answer_of(result).candidate_key == "zero1 ckpt=off mb=1"


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


@pytest.mark.parametrize(("gain", "kept"), [(0.5, True), (0.99, False)])
def test_knobs_that_gain_more_than_noise_are_in_the_answer_and_others_are_not(
    tmp_path: Path, gain: float, kept: bool
) -> None:
    def unpipelined_is_faster(spec: TrialSpec, candidate: CandidateSpec) -> float | None:
        seconds = larger_is_faster(spec, candidate)
        overlaps = spec.deepspeed["zero_optimization"]["overlap_comm"]
        return seconds if seconds is None or overlaps else gain * seconds

    result = tune(tmp_path / "run", Pretender(unpipelined_is_faster), knob_trials=6)
    answer = answer_of(result)
    assert ("overlap_comm=False" in answer.candidate_key) == kept
    assert there(result.best_so_far).candidate_key == answer.candidate_key
    assert sum("[" in record.candidate_key for record in result.records if record.purpose == "measure") == 6
    again = Pretender(unpipelined_is_faster)
    assert tune(tmp_path / "run", again, knob_trials=6).answer == answer
    assert again.specs == []


# Losses


def losing(losses_of: Callable[[str], list[float]]) -> Callable[[TrialRun], object]:
    """Have every rank report these losses, by the key of a trial's first candidate."""

    def then(run: TrialRun) -> None:
        losses = losses_of(run.spec.candidates[0].key)
        told = [replace(event, losses=losses) if isinstance(event, MeasuredEvent) else event for event in run.events[0]]
        run.events = [told] * run.spec.world_size

    return then


def learner(zero2_losses: list[float], then: Callable[[TrialRun], object] = lambda run: None) -> Pretender:
    """Losses fall in its parity trials, but those of the zero2 engine, which is faster at each micro-batch."""
    report = losing(lambda key: zero2_losses if key.startswith("zero2") else [9.0, 8.0, 7.0])
    return Pretender(
        lambda spec, candidate: 4.0 / candidate.micro_batch if "zero2" in candidate.key else 5.0,
        lambda run: (report(run), then(run)),
    )


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
    launcher = learner(losses)
    result = tune(tmp_path / "run", launcher, comparisons=Comparisons())
    answer = answer_of(result)
    assert answer.candidate_key.startswith(rung)
    assert any("losses were not compared" in warning for warning in answer.warnings) == warns
    shallow = [spec for spec in launcher.specs if spec.parity]
    with History(tmp_path / "run", "abc", {}) as history:
        assert {spec.trial for spec in shallow} < set(history.trial_seconds(history.records))
    compared = [candidate.key for spec in shallow for candidate in spec.candidates]
    assert all(key.endswith(" mb=1") for key in compared)
    assert {candidate.beat_step_seconds for spec in shallow for candidate in spec.candidates} == {None}
    assert len(compared) == len(set(compared)), "what holds at one micro-batch holds at the others"
    assert all(record.trial not in {spec.trial for spec in shallow} for record in result.records if record.measurement)
    again = learner(losses)
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
    monkeypatch.setattr("ladder.tuning.parity.package_versions", lambda _: {"torch": torch})
    tune(tmp_path / "first", learner(losses), comparisons=Comparisons(agreements=Agreements(machine=TWO_RANKS)))
    monkeypatch.setattr("ladder.tuning.parity.package_versions", lambda _: {"torch": "2.11.0"})
    machine = replace(TWO_RANKS, memory_limit=TWO_RANKS.memory_limit * memory_limit)
    again, comparisons = learner([9.0, 8.0, 7.0]), Comparisons(agreements=Agreements(machine=machine))
    said: list[TuneEvent] = []
    answer_of(tune(tmp_path / "again", again, machine=machine, comparisons=comparisons, tell=said.append))
    assert len([spec for spec in again.specs if spec.parity]) == made
    agreed = [each.text for each in said if isinstance(each, Note) and "agreed in an earlier tune" in each.text]
    assert len(agreed) == (made == 0)
    answer_of(
        tune(tmp_path / "on", learner([9.0, 8.0, 7.0]), machine=machine, comparisons=comparisons, tell=said.append)
    )
    assert len([each for each in said if isinstance(each, Note) and "agreed in an" in each.text]) == 2 * len(agreed), (
        "what this tune has compared itself is not said again"
    )


def test_a_comparison_that_its_server_did_not_survive_is_made_again(tmp_path: Path) -> None:
    def dies_in_the_first(run: TrialRun) -> None:
        if run.spec.parity and [each.parity for each in launcher.specs].count(True) == 1:
            loses_its_server(run)

    launcher = learner([9.0, 9.0, 9.0], dies_in_the_first)
    answer = answer_of(tune(tmp_path / "run", launcher, comparisons=Comparisons()))
    assert answer.candidate_key.startswith("zero1"), "zero2 loses its steps, as the second comparison shows"


def test_a_comparison_after_which_the_machine_is_in_no_state_for_trials_ends_the_tune(tmp_path: Path) -> None:
    def spoils(run: TrialRun) -> None:
        if run.spec.parity:
            run.stop = Ending(kind="environment", sentence="40 GiB of GPU memory are still held")

    launcher = learner([9.0, 8.0, 7.0], spoils)
    with pytest.raises(EnvironmentFaultError, match="still held"):
        tune(tmp_path / "run", launcher, comparisons=Comparisons())
    assert launcher.specs[-1].parity


def test_losses_are_held_against_those_of_the_plain_rung_with_the_same_states(tmp_path: Path) -> None:
    """Both come to a proof: what has its states in bf16 is faster in its trial, and slower in its proof."""

    def seconds(spec: TrialSpec, candidate: CandidateSpec) -> float:
        return 5.0 if "states" not in candidate.key else 8.0 if spec.proof else 4.0

    launcher = Pretender(seconds, losing(lambda key: [9.0, 6.0] if "states" in key else [9.0, 5.0]))
    zero2: dict[str, Any] = {"rungs": [RUNGS_BY_NAME["zero2"]], "micro_batches": (1,), "techniques": [BF16_STATES]}
    result = tune(tmp_path / "run", launcher, comparisons=Comparisons(), **zero2)
    assert answer_of(result).candidate_key.startswith("zero2 ")
    assert {engine_in(spec.candidates[0].key).key for spec in launcher.specs if spec.parity} == {
        "zero1",
        "zero1+bf16-states",
        "zero2",
        "zero2+bf16-states",
    }


@pytest.mark.parametrize(
    ("key", "losses", "of_the_plain_rung", "agrees"),
    [
        ("zero2", [9.0, 8.95], [9.0, 8.95], None),  # they would not show a lost step
        ("zero2", [9.0, 8.9], [9.0, 8.9], True),
        ("zero2", [9.0, 9.0], [9.0, 8.9], False),  # it takes no step
        ("ddp", [10.0, 5.19], [10.0, 5.0], True),
        ("ddp", [10.0, 5.21], [10.0, 5.0], False),
        ("ddp+compile+fp8", [10.0, 5.49], [10.0, 5.0], True),  # FP8 rounds
        ("ddp+fp8", [10.0, 5.51], [10.0, 5.0], False),
        ("ddp+fp8", [10.0, 10.0], [10.0, 5.0], False),
        ("ddp", [10.0, 8.0, 4.9, 3.5], [10.0, 8.0, 4.9, 2.0], False),
        ("ddp+fp8", [10.0, 8.0, 4.9, 3.5], [10.0, 8.0, 4.9, 2.0], True),  # compared until they have halved
        ("ddp+fp8", [10.0, 8.0, 6.5, 3.5], [10.0, 8.0, 4.9, 2.0], False),
    ],
)
def test_losses_agree_within_what_an_engine_s_techniques_round_where_a_lost_step_would_show(
    key: str, losses: list[float], of_the_plain_rung: list[float], agrees: bool | None
) -> None:
    assert compare(losses, of_the_plain_rung, engine_named(key)).agrees is agrees


@pytest.mark.parametrize(("factor", "words"), [(0.8, "25% faster"), (1.25, "20% slower"), (1.05, "")])
def test_a_proof_at_another_speed_than_the_trial_says_how_far_speeds_vary(
    tmp_path: Path, factor: float, words: str
) -> None:
    launcher = Pretender(lambda spec, candidate: factor if spec.proof else 1.0)
    answer = answer_of(tune(tmp_path / "run", launcher))
    said = [warning for warning in answer.warnings if "than its trial" in warning]
    assert [warning.split(" than ")[0] for warning in said] == ([f"its proof was {words}"] if words else [])


# The time budget


def slow(seconds: Callable[[TrialSpec, CandidateSpec], float | None]) -> tuple[Pretender, Callable[[], float]]:
    """Each trial takes a minute on a clock of its own."""
    launcher = Pretender(seconds, lambda run: setattr(run, "ended", 60.0))
    return launcher, lambda: 60.0 * len(launcher.specs)


def test_the_budget_is_counted_on_the_launchers_clock_and_its_end_says_what_was_left_open(tmp_path: Path) -> None:
    launcher, clock = slow(lambda spec, candidate: 1.0)
    result = tune(tmp_path / "run", launcher, strategy=one_by_one, time_budget=200.0, clock=clock)
    assert [spec.proof for spec in launcher.specs] == [False, False, True]  # a third trial's proof would end at 240 s
    assert result.out_of_time
    assert result.seconds == 60.0 * len(launcher.specs)
    assert "of the time budget of 200 s, no time is left to try zero" in result.stopped


def test_while_nothing_fits_the_next_candidate_is_tried_even_if_its_proof_ends_too_late(tmp_path: Path) -> None:
    launcher, clock = slow(lambda spec, candidate: None if "zero1" in candidate.key else 1.0)
    told: list[TuneEvent] = []
    strategy = first_of_each_engine
    result = tune(tmp_path / "run", launcher, strategy=strategy, time_budget=70.0, clock=clock, tell=told.append)
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
    launcher, clock = slow(lambda spec, candidate: None)
    told: list[TuneEvent] = []
    result = tune(tmp_path / "run", launcher, time_budget=0.5, clock=clock, tell=told.append)
    assert len(launcher.specs) == 1
    notes = [event.text for event in told if isinstance(event, Note)]
    assert "more than the time budget of 0.5 s allows" in notes[0]
    with pytest.raises(UsageError, match="larger --time-budget"):
        require_answer(result)


# What ends badly


@pytest.mark.parametrize(
    ("moment", "error", "words"),
    [("model", ModelNotAccessibleError, "cannot build this model"), ("forward", NothingFitsError, "None ran out of")],
)
def test_where_no_failure_was_for_memory_no_memory_is_recommended(
    tmp_path: Path, moment: str, error: type[Exception], words: str
) -> None:
    broken = Pretender(larger_is_faster, lambda run: fails(run, moment, "KeyError: 'nosuch'"))
    result = tune(tmp_path / "run", broken)
    with pytest.raises(error, match=words) as refusal:
        require_answer(result)
    assert "What would fit" not in str(refusal.value)


def without_answer(space: Space, record: Record) -> TuneResult:
    nothing: dict[str, Any] = {"unsupported": {}, "answer": None, "best_so_far": None, "stopped": ""}
    return TuneResult(space=space, records=[record], cancelled=False, seconds=1.0, **nothing)


@pytest.mark.parametrize("moment", ["model", "warmup"])
def test_a_script_that_never_came_to_be_measured_is_told_why_and_where_its_output_is(moment: str) -> None:
    space, _ = space_on(script_workload(make_script()), TWO_RANKS, RUNGS[:1], (1,))
    sentence = f"rank 1 failed in {moment}: KeyError: 'nosuch'"
    crash = Outcome(kind="crash", sentence=sentence, moment=moment, rank=1)
    result = without_answer(space, make_record(make_candidate("zero0"), "crash", outcome=crash))
    with pytest.raises(UsageError) as refusal:
        require_answer(result)
    assert str(refusal.value) == (
        f"The script failed before its training was measured: {sentence} (its output is in "
        "trials/0001/rank1.log of the run folder)."
    )
    for other in (make_record(make_candidate("zero1"), "gpu_oom"), make_record(make_candidate("zero1"))):
        with pytest.raises(NothingFitsError):
            require_answer(replace(result, records=[*result.records, other]))


def failing(*engines: str, message: str = "ValueError: no such metric") -> Pretender:
    """The proofs of some engines end by an error of the script's evaluation, on whichever rank."""

    def then(run: TrialRun) -> None:
        key = run.spec.candidates[0].key
        if run.spec.proof and key.startswith(engines):
            fails(run, "evaluation", message.format(key=key), candidate=key)
            run.events = run.events if len(launcher.proofs) % 2 else run.events[::-1]

    launcher = Pretender(larger_is_faster, then)
    return launcher


def tune_script(folder: Path, launcher: Launcher, **options: Any) -> TuneResult:
    workload = script_workload(make_script(), global_batch_size=SEQUENCES_PER_STEP)
    return tune_over(launcher, folder, workload, strategy=exhaustive, **options)


def test_a_script_that_fails_alike_in_the_proofs_of_two_engines_is_told_so_and_is_proven_once_it_was_mended(
    tmp_path: Path,
) -> None:
    launcher = failing("zero1", "zero2")
    result = tune_script(tmp_path / "run", launcher)
    assert [key.split()[0] for key in launcher.proofs] == ["zero2", "zero2", "zero1"]
    with pytest.raises(UsageError) as refusal:
        require_answer(result)
    assert str(refusal.value) == (
        f"The script's own evaluation failed in the proof of {launcher.proofs[-1]}: rank 0 failed in evaluation: "
        f"ValueError: no such metric (its output is in trials/{launcher.specs[-1].trial}/rank0.log of the run folder). "
        "Its trials fit in memory: mend the script, and start the same command again."
    )
    mended = answer_of(tune_script(tmp_path / "run", again := failing("none")))
    assert mended.candidate_key.startswith("zero2")
    assert again.proofs == [mended.candidate_key]


def test_a_script_that_fails_on_one_engine_only_is_proven_on_another(tmp_path: Path) -> None:
    answer = answer_of(tune_script(tmp_path / "run", launcher := failing("zero2")))
    assert answer.candidate_key.startswith("zero1")
    assert {key.split()[0] for key in launcher.proofs} == {"zero1", "zero2"}


def test_where_there_is_one_engine_two_failures_alike_are_enough_and_unlike_ones_are_not(tmp_path: Path) -> None:
    one = {"rungs": [RUNGS_BY_NAME["zero2"]]}
    tune_script(tmp_path / "alike", alike := failing("zero2"), **one)
    assert len(alike.proofs) == 2
    tune_script(tmp_path / "unlike", unlike := failing("zero2", message="ValueError: at {key}"), **one)
    assert len(unlike.proofs) > 2


def cannot_meet(run: TrialRun) -> None:
    fails(run, "process_group", "RuntimeError: Unable to find address for: ib0")


def says_nothing(run: TrialRun) -> None:
    run.events = [[DoneEvent(t=2)]] * run.spec.world_size


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (loses_its_server, "The trial server ended unexpectedly"),
        (cannot_meet, "Unable to find address for: ib0"),
        (says_nothing, "The trial ended without a result"),
    ],
)
def test_what_is_no_candidate_s_fault_ends_the_tune_if_it_happens_three_times_in_a_row(
    tmp_path: Path, then: Callable[[TrialRun], object], words: str
) -> None:
    with pytest.raises(EnvironmentFaultError, match=rf"{words} \(3 times in a row\)"):
        tune(tmp_path / "run", Pretender(larger_is_faster, then))
    with History(tmp_path / "run", "abc", {}) as history:
        assert history.records == []


def test_an_engine_of_which_a_rank_was_killed_by_somebody_is_tried_once_more_and_no_oftener(tmp_path: Path) -> None:
    """In a trial or in a proof, by SIGKILL or by SIGTERM."""

    def killed(run: TrialRun, number: signal.Signals) -> None:
        run.events, run.exits = [[PhaseEvent(t=1, phase="measure")]] * run.spec.world_size, {1: -number}

    def twice(run: TrialRun) -> None:
        of_zero1 = [spec for spec in launcher.specs if spec.candidates[0].key.startswith("zero1")]
        if of_zero1 == [run.spec]:
            killed(run, signal.SIGKILL)
        if run.spec.proof and len(launcher.proofs) == 1:
            killed(run, signal.SIGTERM)

    heard: list[TuneEvent] = []
    launcher = Pretender(larger_is_faster, twice)
    found = answer_of(tune(tmp_path / "unlucky", launcher, tell=heard.append))
    usual = answer_of(tune(tmp_path / "usual", Pretender(larger_is_faster)))
    assert found.candidate_key == usual.candidate_key
    said = [each.text for each in heard if isinstance(each, Note) and "tried once more" in each.text]
    assert [text.partition(": ")[2].partition(" in ")[0] for text in said] == [
        "rank 1 was killed by SIGKILL",
        "rank 1 was killed by SIGTERM",
    ]
    always = Pretender(larger_is_faster, lambda run: killed(run, signal.SIGKILL))
    tune(tmp_path / "always", always)
    engines = [spec.candidates[0].key.split()[0] for spec in always.specs]
    assert all(engines.count(name) >= 2 for name in set(engines))
    with History(tmp_path / "always", "abc", {}) as history:
        assert {record.outcome.kind for record in history.records} == {"crash"}


def test_a_fault_of_the_machine_ends_the_tune_keeps_what_was_measured_and_blames_no_candidate(tmp_path: Path) -> None:
    def is_unplugged(run: TrialRun) -> None:
        """The machine fails under the second candidate."""
        first = run.events[0][0]
        fails(run, "backward", "CUDA error: unknown error", candidate=run.spec.candidates[1].key)
        run.events = [[first, *run.events[0]]] * run.spec.world_size
        run.stop = Ending(kind="environment", sentence="GPU 0 has fallen off the bus.")

    launcher = Pretender(larger_is_faster, is_unplugged)
    with pytest.raises(EnvironmentFaultError, match="fallen off the bus"):
        tune(tmp_path / "run", launcher)
    (spec,) = launcher.specs
    with History(tmp_path / "run", "abc", {}) as history:
        assert [(r.candidate_key, r.outcome.kind) for r in history.records] == [(spec.candidates[0].key, "fits")]


def test_when_nothing_fits_the_sentence_says_what_the_most_frugal_one_lacked() -> None:
    space, _ = space_on(WORKLOAD, TWO_RANKS, RUNGS[:1], (1,))
    oom = Outcome(kind="gpu_oom", sentence="rank 1 ran out of GPU memory", moment="engine")
    on_cpu = without_answer(space, make_record(make_candidate("zero0"), "gpu_oom", outcome=oom))
    with pytest.raises(NothingFitsError, match=r"in 1\.00 GiB per CPU rank: 1 candidate failed"):
        require_answer(on_cpu)
    with pytest.raises(NothingFitsError, match=r"in 1\.00 GiB per GPU.*rank 1 ran out of GPU memory\. What would fit"):
        require_answer(replace(on_cpu, space=replace(space, device="cuda")))


# Weights that are saved


def test_weights_of_an_answer_that_was_proven_before_are_saved_also_by_a_second_proof_if_the_first_is_lost(
    tmp_path: Path,
) -> None:
    first = answer_of(tune(tmp_path / "run", Pretender(larger_is_faster)))
    launcher = Pretender(larger_is_faster, lambda run: loses_its_server(run) if len(launcher.specs) == 1 else None)
    saved = answer_of(tune(tmp_path / "run", launcher, save_folder=tmp_path / "weights"))
    assert saved.candidate_key == first.candidate_key
    assert [spec.save_folder for spec in launcher.specs] == [str(tmp_path / "weights")] * 2


def test_a_folder_for_the_weights_that_cannot_be_is_refused_before_any_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    folders = ["--run-dir", str(tmp_path / "run"), "--output", str(tmp_path / "b.json")]
    command = ["tune", "tiny-llama", "--gpus", "0", *folders, "--save-weights", str(tmp_path / "file" / "weights")]
    assert main(command) == 4
    assert "--save-weights" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["disk_full", "crash"])
def test_weights_that_cannot_be_saved_end_the_tune_and_the_answer_stays(tmp_path: Path, kind: Any) -> None:
    def is_not_saved(run: TrialRun) -> None:
        if run.spec.save_folder:
            fails(run, "gather", "OSError: no space left", kind=kind)
            run.exits = {0: 1, 1: 1}

    first = tune(tmp_path / "run", Pretender(larger_is_faster))
    launcher = Pretender(larger_is_faster, is_not_saved)
    with pytest.raises(EnvironmentFaultError, match=r"The weights were not saved: .*choose another --save-weights"):
        tune(tmp_path / "run", launcher, save_folder=tmp_path / "weights")
    assert len(launcher.specs) == 1
    assert tune(tmp_path / "run", Pretender(larger_is_faster)).answer == first.answer
