"""A plain accelerate program that says nothing of DeepSpeed: torch's AdamW, a DataLoader, gradient accumulation."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator, PartialState
from tiny import build_model, leave, report, sequences, weight_sums
from torch.utils.data import DataLoader

# On a CPU accelerate otherwise takes every rank for the only one, and gives them all the same data. No file or
# variable can say this for the script: ACCELERATE_USE_CPU turns DeepSpeed off.
PartialState(cpu=not torch.cuda.is_available())
accelerator = Accelerator()
model = build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(sequences(16), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
before = weight_sums(model.module)
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
report("accelerate", model, before, losses, argv=sys.argv[1:], world_size=accelerator.num_processes)
accelerator.end_training()
leave()
