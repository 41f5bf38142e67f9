# mypy: disable-error-code="import-not-found"
"""Lets accelerate halve the batch until it fits."""

from few import trainer
from transformers import TrainingArguments

arguments = TrainingArguments(
    output_dir="found-batch",
    auto_find_batch_size=True,
    per_device_train_batch_size=64,
    max_steps=2,
    report_to="none",
)
halving = trainer(arguments)
halving.train()
print("trained with a batch of", halving._train_batch_size)
