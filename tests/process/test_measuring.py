"""How a rank warms up, settles its limit and times. On CPU ranks the limit never narrows, so that is played."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers import tiny_trial

from ladder.events.step_policy import CandidateSpec, StepPolicy
from ladder.trial.gauge import Reading
from ladder.trial.measuring import _measure
from ladder.trial.reporter import Reporter
from ladder.trial.steps import NewLength, Step, Stepper, Timings
from ladder.trial.subject import Kind


class Played:
    """Gauge, subject, stepper and reporter in one: what was asked of them, in order."""

    is_even = True

    def __init__(self, narrows: bool, needs_one: bool) -> None:
        self.narrows, self.needs_one = narrows, needs_one
        self.asked: list[str] = []

    def phase(self, name: str) -> None:
        self.asked.append(name)

    def reset(self) -> None:
        self.asked.append("reset")

    def settle(self) -> bool:
        return self.narrows

    def agree(self, stop: bool) -> bool:
        return stop

    def needs_one_more(self, candidate: CandidateSpec) -> bool:
        return self.needs_one

    def warm_up(self, candidate: CandidateSpec, num_steps: int) -> list[float]:
        self.asked.append(f"{num_steps} untimed")
        return [9.0] * num_steps

    def settle_in(self, candidate: CandidateSpec) -> list[float]:
        self.asked.append("1 usual")
        return [9.0]

    def time(self, *_: Any) -> Timings:
        self.asked.append("timed")
        return Timings(steps=[Step(None, 1.0, 1.0, [8.0], skipped=False)], losses=[8.0])

    def read(self) -> Reading:
        return Reading(
            allocated=1, reserved=1, device=1, outside_torch=0, peak_host=1, held_host=1, alloc_retries=0, others=None
        )


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("narrows", [True, False])
@pytest.mark.parametrize("needs_one", [True, False])
def test_what_a_narrower_limit_emptied_is_reserved_anew_before_anything_is_timed(
    tmp_path: Path, first: bool, narrows: bool, needs_one: bool
) -> None:
    played: Any = Played(narrows, needs_one)
    spec = tiny_trial(tmp_path / "0001", 1)
    event = _measure(spec, spec.candidates[0], played, played, played, played, first=first)
    emptied = ["reset"] if narrows else []
    again = ["1 untimed"] if narrows or (first and needs_one) else []
    assert played.asked == ["warmup", "reset", "1 untimed", *emptied, *again, "measure", "timed"]
    assert event.losses[-1] == 8.0


def test_uneven_batches_are_timed_only_after_one_step_on_usual_ones(tmp_path: Path) -> None:
    played: Any = Played(narrows=False, needs_one=True)
    played.is_even = False
    spec = tiny_trial(tmp_path / "0001", 1)
    _measure(spec, spec.candidates[0], played, played, played, played, first=False)
    assert played.asked == ["warmup", "reset", "1 untimed", "1 usual", "measure", "timed"]


class Idle:
    """A training that does nothing."""

    is_even, skipped_steps, shared_seconds = True, 0, 0.0

    def begin_step(self) -> None: ...

    def draw(self, *_: Any, **__: Any) -> Any: ...

    def train_on(self, *_: Any, **__: Any) -> float:
        return 0.0


@pytest.fixture
def stepper_of(tmp_path: Path) -> Iterator[Callable[..., tuple[Stepper, CandidateSpec]]]:
    """A stepper of a training by one rank, and its candidate; keywords are changes to the trial."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    def made(subject: Any, accumulation: int = 1, **changes: Any) -> tuple[Stepper, CandidateSpec]:
        spec = replace(tiny_trial(tmp_path, 1, accumulation=accumulation), **changes)
        return Stepper(subject, spec, Reporter(tmp_path / "rank0.jsonl")), spec.candidates[0]

    yield made
    dist.destroy_process_group()


class Lengths(Idle):
    """A training that prepares kernels for each new length of a batch, for half of its micro-steps."""

    is_even = False
    USUAL, PREPARING, SHARE = 0.01, 0.1, 0.5

    def __init__(self, prepares: bool) -> None:
        self.seconds: dict[Kind, float] = {"usual": self.USUAL, "new": self.USUAL + prepares * self.PREPARING}

    def share_of_new_lengths(self, candidate: CandidateSpec) -> float:
        return self.SHARE

    def draw(self, candidate: CandidateSpec, kind: Kind) -> Kind:
        return kind

    def train_on(self, batch: Kind, *, is_boundary: bool) -> float:
        time.sleep(self.seconds[batch])
        return 0.0


@pytest.mark.alone  # it times sleeps of hundredths of a second
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("prepares", [True, False])
def test_a_step_takes_longer_by_the_share_of_new_lengths_that_a_training_meets(
    stepper_of: Any, prepares: bool, accumulation: int
) -> None:
    subject = Lengths(prepares)
    stepper, candidate = stepper_of(subject, accumulation)
    stepper.settle_in(candidate)
    timings = stepper.time(candidate, StepPolicy(maximum=3, seconds=0.2))
    assert timings.new_length is not None
    expected = NewLength(subject.PREPARING, subject.SHARE)
    if prepares:
        assert timings.new_length.seconds == pytest.approx(expected.seconds, rel=0.3)
        least = subject.USUAL + expected.share * timings.new_length.seconds
        assert all(least <= micro < least + expected.seconds / 3 for micro in (*timings.accumulate, *timings.boundary))
        assert all(step.seconds == pytest.approx((step.accumulate or 0) + step.boundary) for step in timings.steps)
    else:
        assert timings.new_length.seconds < expected.seconds / 3


@pytest.mark.parametrize("proof", [True, False])
@pytest.mark.parametrize("beat", [None, 1e-9])
@pytest.mark.parametrize("long_seconds", [0.0, 60.0])
def test_a_second_untimed_step_is_left_out_after_a_long_one_of_a_proof_and_one_that_cannot_win(
    stepper_of: Any, long_seconds: float, beat: float | None, proof: bool
) -> None:
    steps = StepPolicy(maximum=3, seconds=0.2, long_seconds=long_seconds)
    stepper, candidate = stepper_of(Idle(), steps=steps, proof=proof)
    candidate = replace(candidate, beat_step_seconds=beat)
    stepper.warm_up(candidate, 1)
    is_long = proof and long_seconds == 0
    assert stepper.needs_one_more(candidate) is (not is_long and beat is None)


class Unsteady(Idle):
    """A training whose steps take the given seconds, but for the first ones, which it skips."""

    def __init__(self, *seconds: float, num_skipped: int = 0) -> None:
        self._seconds, self._num_skipped = list(seconds), num_skipped

    def train_on(self, *_: Any, **__: Any) -> float:
        if self.skipped_steps < self._num_skipped:
            self.skipped_steps += 1
        else:
            time.sleep(self._seconds.pop(0))
        return 0.0


def timed(stepper_of: Any, subject: Unsteady, policy: StepPolicy, *, untimed: int = 0) -> Timings:
    stepper, candidate = stepper_of(subject)
    stepper.warm_up(candidate, untimed)
    timings: Timings = stepper.time(candidate, policy)
    return timings


def test_steps_that_fp16_overflow_skips_are_not_counted(stepper_of: Any) -> None:
    """DeepSpeed's fp16 needs a GPU: the first optimizer steps overflow, are skipped, and are quicker for it."""
    policy = StepPolicy(minimum=4, maximum=4, target_spread=0.0, seconds=60.0)
    timings = timed(stepper_of, Unsteady(*[0.02] * 4, num_skipped=3), policy)
    assert timings.skipped == 3
    assert len(timings.boundary) == 4
    assert min(timings.boundary) >= 0.02


@pytest.mark.parametrize(("seconds", "num_timed"), [((0.3, 0.5, 0.5), 1), ((0.5, 0.3, 0.5, 0.5), 2)])
def test_a_long_step_is_timed_once_where_the_untimed_one_before_it_agrees(
    stepper_of: Any, seconds: tuple[float, ...], num_timed: int
) -> None:
    policy = StepPolicy(seconds=0.5, target_spread=0.0)
    assert len(timed(stepper_of, Unsteady(*seconds), policy, untimed=2).boundary) == num_timed
