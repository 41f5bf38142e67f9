"""Bound cores in a rank."""

from __future__ import annotations

import os

from ladder.machine.cores import usable_by_place
from ladder.techniques.bound_cores import BIND_CORES
from ladder.trial.techniques import RankTechnique


class BoundCores(RankTechnique):
    def claim_host(self, rank: int, world_size: int) -> None:
        """Before torch starts threads, which inherit the cores of the one that starts them."""
        cores = BIND_CORES.cores_of_ranks(usable_by_place(), world_size)[rank]
        os.sched_setaffinity(0, cores)
        print(f"ladder: bound to cores {cores}", flush=True)


TECHNIQUE = BoundCores()
