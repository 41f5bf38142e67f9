"""Train a tiny model with DeepSpeed alone, once for each configuration on the command line.

    torchrun --nproc_per_node 2 train_deepspeed.py best_config.json

The optimizer is torch's, unless the file has one (`ladder tune --with-optimizer 3e-3`): then DeepSpeed makes it. An
answer that offloads the optimizer to the CPU needs DeepSpeedCPUAdam from deepspeed.ops.adam in place of torch's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from tiny import build_model, leave, report, sequences, weight_sums


def train(config: str) -> None:
    model = build_model()
    given: dict[str, Any] = {"model_parameters": list(model.parameters())}
    if "optimizer" not in json.loads(Path(config).read_text()):
        given = {"optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3)}
    engine, *_ = deepspeed.initialize(model=model, config=config, **given)
    before = weight_sums(engine.module)
    rows = sequences(engine.train_micro_batch_size_per_gpu())
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    losses = []
    for _ in range(2 * engine.gradient_accumulation_steps()):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    report(Path(config).stem, engine, before, losses)
    engine.destroy()


for path in sys.argv[1:]:
    train(path)
torch.distributed.destroy_process_group()
leave()
