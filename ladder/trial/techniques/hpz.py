"""hpZ in a rank: DeepSpeed makes the copies by itself, so this only checks that it does."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups

from ladder.trial.techniques import RankTechnique


class Hpz(RankTechnique):
    first_differs = True

    def check_optimizer(self, optimizer: Any) -> None:
        """Without groups smaller than the world, no copy would be kept."""
        group = groups._get_zero_param_intra_parallel_group()  # there is no public way to ask
        if group is None or not 1 < dist.get_world_size(group) < dist.get_world_size():
            raise RuntimeError("DeepSpeed keeps no copy of the weights in each node")


TECHNIQUE = Hpz()
