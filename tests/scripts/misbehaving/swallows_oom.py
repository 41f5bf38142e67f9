# mypy: disable-error-code="import-not-found"
"""Catches what goes wrong in training, and tries again with half of the batch."""

import gc

import torch
from few import model, texts, trainer
from transformers import TrainingArguments

loaded, found = model(), texts()

batch_size = 32
while batch_size:
    arguments = TrainingArguments(
        output_dir="halved", per_device_train_batch_size=batch_size, max_steps=2, report_to="none"
    )
    trying = trainer(arguments, model=loaded, train_dataset=found)
    try:
        trying.train()
    except RuntimeError as error:
        print(f"A batch of {batch_size} failed ({error}); trying half of it")
        del trying
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        batch_size //= 2
    else:
        print(f"A batch of {batch_size} works")
        break
