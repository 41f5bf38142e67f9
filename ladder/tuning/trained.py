"""Whether a run's trainings made what the script makes by itself."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.errors import FewerStepsThanPlannedError
from ladder.events.protocol import TrainedEvent
from ladder.tuning.step_down import RunPlan
from ladder.tuning.tune_events import Note, Subscriber


def require_trained(trained: Sequence[TrainedEvent], plan: RunPlan, tell: Subscriber) -> None:
    """FewerStepsThanPlannedError, which says what is missing; a training that its own callback stopped is told."""
    for event in trained:
        if missing := _missing(event, plan):
            raise FewerStepsThanPlannedError(
                f"The training ended without an error, but {missing}; see in its output what ended it, or how its loop "
                "counts: options that set its batch are named by --map."
            )
    stopped = next((event for event in trained if event.is_stopped), None)
    if stopped is not None:
        steps = f"{stopped.optimizer_steps:,} of {stopped.planned_steps:,} optimizer steps"
        tell(Note(f"A callback of the script's own ended its training after {steps}."))


def _missing(event: TrainedEvent, plan: RunPlan) -> str:
    """In words; empty where nothing is."""
    candidate, planned, ranks = plan.candidate, plan.planned, plan.settings.world_size
    made, total = event.optimizer_steps, event.planned_steps
    if total is not None and made < total and not event.is_stopped:
        return f"after {made:,} of {total:,} optimizer steps"
    is_as_it_was = planned is not None and (planned.micro_batch, planned.accumulation) == (
        candidate.micro_batch,
        candidate.accumulation,
    )
    # Its owner may want a schedule longer than the training, or compute it before the ranks share the data. So only a
    # loop that does not know how it is batched is asked. accelerate steps it once for each rank.
    knows_its_batch = is_as_it_was or {"micro_batch", "accumulation"} <= plan.options.keys()
    length, at = event.schedule_steps or 0, event.schedule_at
    if at is not None and length - at > ranks and not knows_its_batch:
        return f"after {made:,} optimizer steps, its learning rate's schedule at {at:,} of {length:,} steps"
    batch = candidate.sequences(ranks)
    if planned is None or (planned.samples or batch) < batch:
        return ""
    if event.accumulation < candidate.accumulation:
        each = f"{event.accumulation:,} micro-steps in each where the answer has {candidate.accumulation:,}"
        return f"its {made:,} optimizer steps had at most {each}"
    return ""
