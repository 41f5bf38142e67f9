# mypy: disable-error-code="import-untyped, import-not-found, misc, no-untyped-def, no-untyped-call"
"""Trains, and then fails: in its evaluation, with --save when it saves, with --resume when it loads that again."""

import sys

from few import model, texts, trainer
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

saves, resumes = "--save" in sys.argv, "--resume" in sys.argv


class Unloaded(LlamaForCausalLM):
    def load_state_dict(self, *arguments, **options):
        raise KeyError("the checkpoint has the names of another release")


loaded = Unloaded.from_pretrained("model") if resumes else model()
parts = texts().train_test_split(test_size=0.1, seed=0)


def score(found):
    raise ValueError(f"no metric for {type(found).__name__}")


class Unsaved(Trainer):
    def _save_checkpoint(self, model, trial):
        raise PermissionError("the archive takes no checkpoint")


arguments = TrainingArguments(
    output_dir="failed",
    per_device_train_batch_size=4,
    max_steps=2,
    eval_strategy="no" if saves or resumes else "epoch",
    save_strategy="epoch" if saves or resumes else "no",
    report_to="none",
)
trainer(
    arguments,
    Unsaved if saves else Trainer,
    model=loaded,
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
    compute_metrics=None if saves or resumes else score,
).train()
