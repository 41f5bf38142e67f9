# mypy: disable-error-code="import-untyped, import-not-found"
"""Reads a data set whose folder is missing."""

from datasets import load_from_disk
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("model")
texts = load_from_disk("prepared/reviews")
arguments = TrainingArguments(output_dir="no-data", max_steps=2, report_to="none")
Trainer(model=model, args=arguments, train_dataset=texts).train()
