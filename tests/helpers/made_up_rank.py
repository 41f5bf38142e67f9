"""The rank's half of the made-up technique: it counts the batches it has seen, in the rank's own log."""

from __future__ import annotations

import torch

from ladder.trial.techniques import RankTechnique


class MadeUp(RankTechnique):
    def own_batch(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        print("the made-up technique was here", flush=True)
        return batch


TECHNIQUE = MadeUp()
