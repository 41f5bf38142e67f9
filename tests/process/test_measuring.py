"""How a rank warms up, settles its limit and times. On CPU ranks the limit never narrows, so that is played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_trial

from ladder.events.protocol import CandidateSpec
from ladder.trial.gauge import Reading
from ladder.trial.measuring import _measure
from ladder.trial.steps import Step, Timings


class Played:
    """Gauge, subject, stepper and reporter in one: what was asked of them, in order."""

    is_even = True

    def __init__(self, narrows: bool, hopeless: bool) -> None:
        self.narrows, self.hopeless = narrows, hopeless
        self.asked: list[str] = []

    def phase(self, name: str) -> None:
        self.asked.append(name)

    def reset(self) -> None:
        self.asked.append("reset")

    def settle(self) -> bool:
        return self.narrows

    def agree(self, stop: bool) -> bool:
        return stop

    def is_hopeless(self, candidate: CandidateSpec) -> bool:
        return self.hopeless

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
        return Reading(allocated=1, reserved=1, device=1, outside_torch=0, peak_host=1, held_host=1, alloc_retries=0)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("narrows", [True, False])
@pytest.mark.parametrize("hopeless", [True, False])
def test_what_a_narrower_limit_emptied_is_reserved_anew_before_anything_is_timed(
    tmp_path: Path, first: bool, narrows: bool, hopeless: bool
) -> None:
    played: Any = Played(narrows, hopeless)
    spec = tiny_trial(tmp_path / "0001", 1)
    event = _measure(spec, spec.candidates[0], played, played, played, played, first=first)
    emptied = ["reset"] if narrows else []
    again = ["1 untimed"] if narrows or (first and not hopeless) else []
    assert played.asked == ["warmup", "reset", "1 untimed", *emptied, *again, "measure", "timed"]
    assert event.losses[-1] == 8.0


def test_uneven_batches_are_timed_only_after_one_step_on_usual_ones(tmp_path: Path) -> None:
    played: Any = Played(narrows=False, hopeless=False)
    played.is_even = False
    spec = tiny_trial(tmp_path / "0001", 1)
    _measure(spec, spec.candidates[0], played, played, played, played, first=False)
    assert played.asked == ["warmup", "reset", "1 untimed", "1 usual", "measure", "timed"]
