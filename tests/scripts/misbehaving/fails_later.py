# mypy: disable-error-code="import-untyped, import-not-found, misc, no-untyped-def, no-untyped-call"
"""Trains, and then fails: in its evaluation, with --save when it saves, with --resume when it loads that again."""

import sys

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

saves, resumes = "--save" in sys.argv, "--resume" in sys.argv


class Unloaded(LlamaForCausalLM):
    def load_state_dict(self, *arguments, **options):
        raise KeyError("the checkpoint has the names of another release")


tokenizer = AutoTokenizer.from_pretrained("model")
model = (Unloaded if resumes else AutoModelForCausalLM).from_pretrained("model")
texts = load_dataset("json", data_files="text/train.jsonl", split="train")
texts = texts.map(lambda row: tokenizer(row["text"], truncation=True, max_length=64), remove_columns=["text"])
parts = texts.train_test_split(test_size=0.1, seed=0)


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
kind = Unsaved if saves else Trainer
kind(
    model=model,
    args=arguments,
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    compute_metrics=None if saves or resumes else score,
).train()
