# mypy: disable-error-code="import-not-found, misc"
"""Prints a gigabyte before it trains, and goes on printing."""

import sys
from typing import Any

from few import trainer
from transformers import Trainer, TrainingArguments

line = "x" * 1023 + "\n"
for _ in range(1024):
    sys.stdout.write(line * 1024)
sys.stdout.flush()


class Loud(Trainer):
    def training_step(self, *arguments: Any, **options: Any) -> Any:
        print("step", "x" * 10_000)
        return super().training_step(*arguments, **options)


trainer(TrainingArguments(output_dir="printed", max_steps=2, report_to="none"), Loud).train()
