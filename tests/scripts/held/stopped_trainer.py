# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""A Trainer that a callback stops, whose best model counts, and whose number of steps is set late; it writes then."""

import sys
from typing import Any

from few import model, rows, write
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 5:
            control.should_training_stop = True
            if "fails" in sys.argv:
                raise TimeoutError("its time is over")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        print("evaluated", flush=True)


class Writes(Trainer):
    def train(self, *arguments: Any, **options: Any) -> Any:
        done = super().train(*arguments, **options)
        write("within train")
        return done


plateau = {"lr_scheduler_type": "reduce_lr_on_plateau"} if "plateau" in sys.argv else {}
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=4,
    eval_strategy="steps",
    save_strategy="steps",
    eval_steps=2,
    save_steps=2,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    report_to="none",
    **plateau,
)
arguments.max_steps = 20
trainer = Writes(
    model=model(),
    args=arguments,
    train_dataset=rows(),
    eval_dataset=rows(8),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=1), Stops()],
)
try:
    trainer.train()
finally:
    write("finally")
write("after")
