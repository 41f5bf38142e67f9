# mypy: disable-error-code="import-not-found"
"""Leaves its optimizer to a DeepSpeed file that is not there, as accelerate's DummyOptim does."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DummyOptim
from few import collate, model, texts
from torch.utils.data import DataLoader

loader: Any = DataLoader(texts(), batch_size=4, collate_fn=collate)
trained = model()
Accelerator(cpu=True).prepare(trained, DummyOptim(trained.parameters()), loader)
