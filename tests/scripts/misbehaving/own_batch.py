# mypy: disable-error-code="import-untyped, import-not-found, misc, no-untyped-def, no-untyped-call"
"""Decides itself, as its options say, what its arguments decide; its collator takes its time."""

import sys
import time
from typing import Any

import torch
from few import collate, trainer
from transformers import Trainer, TrainingArguments


class OwnBatch(Trainer):
    def get_train_dataloader(self):
        loader = torch.utils.data.DataLoader(
            self.train_dataset, batch_size=2, collate_fn=self.data_collator, shuffle=True
        )
        return self.accelerator.prepare(loader)


class OwnAccumulation(Trainer):
    def get_train_dataloader(self):
        self.args.gradient_accumulation_steps = 2
        return super().get_train_dataloader()


class OwnCheckpointing(Trainer):
    def training_step(self, model, *arguments, **options):
        self.model.activation_checkpointing_enable()
        return super().training_step(model, *arguments, **options)


def slowly(samples):
    time.sleep(0.05)
    return collate(samples)


arguments = TrainingArguments(
    output_dir="own-batch",
    per_device_train_batch_size=4,
    max_steps=2,
    report_to="none",
    remove_unused_columns=False,
)
kinds = {"--own_batch": OwnBatch, "--own_accumulation": OwnAccumulation, "--own_checkpointing": OwnCheckpointing}
kind: Any = next((each for option, each in kinds.items() if option in sys.argv), Trainer)
trainer(arguments, kind, data_collator=slowly).train()
