"""Whether a training under an answer is the script's own: what it plans is compared, and what it made is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback

from ladder.events.protocol import TrainedEvent
from ladder.trial.reporter import now
from ladder.trial.script.facts import count_parameters, length_of_schedule
from ladder.trial.script.hold import Grip
from ladder.trial.script.seen import TrainsOtherwiseError


def _require_planned(grip: Grip, rounds: bool, **plans: int | None) -> None:
    """End a training that plans something else than the script does by itself; `plans` has fields of OwnTraining.

    The look saw the first training of the script, so no later one is compared; nor is a trial before the proof, which
    accumulates less. If the loader or the loop `rounds` an epoch, another micro-batch may round it otherwise.
    """
    if not (grip.is_run or grip.spec.proof):
        return
    for name, is_now in plans.items():
        own = getattr(grip.script.planned, name, None)
        if own is None or is_now is None or name in grip.made.compared:
            continue
        grip.made.compared.add(name)
        if abs(own - is_now) > (_epochs(grip, own) if rounds and name != "trainable" else 0):
            grip.leave(
                TrainsOtherwiseError(
                    f"with these settings the script plans {is_now:,} {_IN_WORDS[name]}, and {own:,} by itself; "
                    "if it computes them from its batch, name the options that set it: --map micro_batch=--OPTION "
                    "--map accumulation=--OPTION"
                )
            )


def _epochs(grip: Grip, steps: int) -> int:
    """In `steps`, where its last step is not full: else every micro-batch has the same number of steps."""
    (candidate,), samples = grip.spec.candidates, grip.script.planned.samples if grip.script.planned else None
    batch = candidate.micro_batch * candidate.accumulation * grip.spec.world_size
    return math.ceil(steps * batch / samples) if samples and samples % batch else 0


def require_planned_trainer(grip: Grip, trainer: Trainer, steps: int | None) -> None:
    """Of a Trainer that is about to train."""
    _require_planned(grip, rounds=trainer.args.dataloader_drop_last, optimizer_steps=steps)


_IN_WORDS = {
    "optimizer_steps": "optimizer steps",
    "schedule_steps": "steps of its learning rate's schedule",
    "trainable": "trained parameters",
}


def require_planned_loop(grip: Grip, model: Any, schedule: Any) -> None:
    """Of a loop whose engine is about to be made."""
    grip.made.schedule = schedule
    length, trainable = length_of_schedule(schedule), count_parameters(model)[1]
    _require_planned(grip, rounds=True, schedule_steps=length, trainable=trainable)


def report_loop(grip: Grip) -> None:
    """What the loops of this process made, once their program is over."""
    made, schedule = grip.made, grip.made.schedule
    at = getattr(schedule, "last_epoch", getattr(schedule, "last_batch_iteration", None))  # DeepSpeed's own have this
    if made.optimizer_steps and "trainer" not in grip.holders:
        grip.reporter.send(
            TrainedEvent(
                t=now(),
                optimizer_steps=made.optimizer_steps,
                accumulation=made.accumulation,
                schedule_steps=length_of_schedule(schedule),
                schedule_at=at,
            )
        )


def train_counted(grip: Grip, trainer: Trainer, train: Callable[[], Any]) -> Any:
    """What `train` returns, which trains with `trainer`; what it made is reported."""
    trainer.add_callback(_Planned(grip, trainer))
    result = train()
    state, total = trainer.state, trainer.state.max_steps
    is_short = state.global_step < total
    grip.reporter.send(
        TrainedEvent(
            t=now(),
            optimizer_steps=state.global_step,
            planned_steps=total,
            accumulation=grip.made.accumulation,
            is_stopped=bool(is_short and trainer.control.should_training_stop),  # a callback may have set a tensor
        )
    )
    return result


class _Planned(TrainerCallback):  # type: ignore[misc]
    """Compares what the Trainer plans when it begins."""

    def __init__(self, grip: Grip, trainer: Trainer) -> None:
        self._grip, self._trainer = grip, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        require_planned_trainer(self._grip, self._trainer, state.max_steps)
