"""torch.compile in a rank. accelerate compiles, as the environment says that training will have too."""

from __future__ import annotations

import torch

from ladder.trial.techniques import RankTechnique


class Compiled(RankTechnique):
    compiles = True

    def begin_candidate(self) -> None:
        """Forget what was compiled: for a second shape torch makes kernels for any, which may be slower."""
        torch.compiler.reset()


TECHNIQUE = Compiled()
