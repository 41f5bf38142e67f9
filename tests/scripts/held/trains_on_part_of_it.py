# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""Goes on within an epoch, or trains on other data than what it gave to prepare(), or divides batches among ranks."""

import sys
from typing import Any

from accelerate import skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from few import Training, rows
from torch.utils.data import DataLoader

way = sys.argv[1]
config = DataLoaderConfiguration(split_batches=way == "divided")
training = Training(400, dataloader_config=config)
first: Any = training.loader
if way == "resumed":
    first = skip_first_batches(training.loader, 7)
elif way == "others":
    others: Any = rows(4000)
    first = DataLoader(others, batch_size=4)
for epoch in range(400):
    for batch in training.loader if epoch else first:
        training.step(batch)
