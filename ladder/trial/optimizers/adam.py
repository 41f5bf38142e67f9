"""Adam in a rank."""

from __future__ import annotations

import torch

from ladder.trial.optimizers.adamw import AdamW


class Adam(AdamW):
    torch_class = torch.optim.Adam
    decouples_decay = False


OPTIMIZER = Adam()
