"""Bound cores in a rank."""

from __future__ import annotations

import os

from ladder.techniques.bound_cores import cores_of
from ladder.trial.techniques import RankTechnique


class BoundCores(RankTechnique):
    def claim_host(self, rank: int, world_size: int) -> None:
        """Before torch starts threads, which inherit the cores of the one that starts them."""
        cores = cores_of(rank, sorted(os.sched_getaffinity(0)), world_size)
        os.sched_setaffinity(0, cores)
        print(f"ladder: bound to cores {cores}", flush=True)


TECHNIQUE = BoundCores()
