"""Train a tiny model with accelerate: torch's AdamW, a DataLoader and gradient accumulation.

bash best_config.launch.sh train_accelerate.py

The optimizer is torch's, unless the file has one (`ladder tune --with-optimizer 3e-3`): then DeepSpeed makes it.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DummyOptim
from tiny import build_model, leave, report, sequences, weight_sums
from torch.utils.data import DataLoader

# A script for GPUs does not need this line. On a CPU, without it, accelerate gives every rank the same data.
PartialState(cpu=not torch.cuda.is_available())
accelerator = Accelerator()
model = build_model()
settings = accelerator.state.deepspeed_plugin.deepspeed_config
if "optimizer" in settings:
    optimizer = DummyOptim(model.parameters(), lr=settings["optimizer"]["params"]["lr"])
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(sequences(16), batch_size=settings["train_micro_batch_size_per_gpu"])
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
before = weight_sums(model.module)
losses = []
for batch in loader:
    # Without this line accelerate makes an optimizer step after every micro-batch.
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
report("accelerate", model, before, losses, argv=sys.argv[1:], world_size=accelerator.num_processes)
accelerator.end_training()
leave()
