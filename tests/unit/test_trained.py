"""What a training under an answer made, beside what the script makes by itself."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import make_candidate
from helpers.answers import answer

from ladder.emit.config import best_config
from ladder.emit.settings import settings_in
from ladder.errors import FewerStepsThanPlannedError
from ladder.events.protocol import TrainedEvent
from ladder.tuning.script_run import require_trained
from ladder.tuning.step_down import RunPlan
from ladder.tuning.tune_events import Note
from ladder.workload.script import OwnTraining


def told(planned: dict[str, Any] | None = None, options: tuple[str, ...] = (), **made: Any) -> str:
    """What the user is told of a training on four ranks with a micro-batch of 4, twice for a step."""
    notes: list[Any] = []
    own = {"micro_batch": 1, "accumulation": 8, "optimizer_steps": None, "schedule_steps": None, "samples": 900}
    plan = RunPlan(
        settings=settings_in(best_config(answer())),
        candidate=make_candidate("zero3", micro_batch=4, accumulation=2),
        config={},
        options=dict.fromkeys(options, "--an-option"),
        planned=OwnTraining(**own | planned, trainable=7) if planned is not None else None,
    )
    event = TrainedEvent(t=1.0, **{"optimizer_steps": 100, "accumulation": 2} | made)
    try:
        require_trained([event], plan, notes.append)
    except FewerStepsThanPlannedError as error:
        return str(error)
    return "".join(each.text for each in notes if isinstance(each, Note))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"planned_steps": 101}, "but after 100 of 101 optimizer steps;"),
        ({"schedule_steps": 1_500, "schedule_at": 193}, "rate's schedule at 193 of 1,500 steps;"),
        ({"accumulation": 1}, "its 100 optimizer steps had at most 1 micro-steps in each where the answer has 2;"),
    ],
)
def test_a_training_that_lost_steps_is_told_with_both_numbers(made: dict[str, Any], said: str) -> None:
    assert said in told({}, **made)


@pytest.mark.parametrize(
    ("planned", "made"),
    [
        ({}, {"planned_steps": 100}),
        ({}, {"schedule_steps": 400, "schedule_at": 396}),  # accelerate steps it once for each of the four ranks
        ({"micro_batch": 4, "accumulation": 2}, {"schedule_steps": 1_500, "schedule_at": 193}),  # its owner wants it so
        ({}, {"schedule_steps": 1_500, "schedule_at": 750, "options": ("micro_batch", "accumulation")}),
        ({"samples": 31}, {"accumulation": 1}),  # its data fill no optimizer step
        (None, {"accumulation": 1}),  # another command than the one that was tuned
    ],
)
def test_a_training_that_made_what_the_script_makes_is_told_nothing(
    planned: dict[str, Any] | None, made: dict[str, Any]
) -> None:
    assert told(planned, **made) == ""


def test_a_callback_of_the_script_s_own_may_end_its_training_early() -> None:
    assert told({}, planned_steps=1_000, is_stopped=True) == (
        "A callback of the script's own ended its training after 100 of 1,000 optimizer steps."
    )
