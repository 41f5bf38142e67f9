# mypy: disable-error-code="import-not-found"
"""Asks before it trains."""

from few import model, trainer
from transformers import TrainingArguments

loaded = model()
steps = int(input("How many steps? "))
trainer(TrainingArguments(output_dir="asked", max_steps=steps, report_to="none"), model=loaded).train()
