"""A training that nothing has taken hold of: a look at the script ends it before it changes anything."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ladder.trial.script.hold import Grip, NotTakenHoldOfError

LOOKED_FOR = "Trainer.train() of transformers, Accelerator.prepare() and deepspeed.initialize()"


def refuse_unheld_training(grip: Grip) -> None:
    """From now on a look ends, with a report, at the first step of any optimizer.

    Whatever is taken hold of ends a look before it makes a step, so this one is the script's own training.
    """

    def begins(*_: Any) -> None:
        grip.leave(NotTakenHoldOfError(_sentence(grip)))

    if grip.is_look:
        register_optimizer_step_pre_hook(begins)


def _sentence(grip: Grip) -> str:
    if "accelerate" in grip.holders:
        return (
            "its Accelerator prepares the model and its training data in separate calls; give model, optimizer and "
            "training data to one call of prepare()"
        )
    return f"it trains in a way that ladder does not know: it looked for {LOOKED_FOR}"
