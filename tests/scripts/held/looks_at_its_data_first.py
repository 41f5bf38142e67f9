# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""Reads its loader before it trains and while it does, and never calls train(): its model stays as it was loaded."""

import torch
from few import Training

training = Training()
training.model.eval()
first = next(iter(training.loader))
print(sum(batch["input_ids"].numel() for batch in training.loader), "tokens")
for _epoch in range(4000):
    for number, batch in enumerate(training.loader):
        training.step(batch)
        if number % 8 == 0:
            with torch.no_grad():
                losses = [training.model(**each).loss.item() for each in training.loader]
            print(len(losses), "batches evaluated", flush=True)
