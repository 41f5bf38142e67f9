"""Hybrid sharding: FSDP2 divides weights and states within each node, and all nodes have the same (torch's HSDP)."""

from __future__ import annotations

from typing import Any

from ladder.candidates import Consent, Effects, Export, Problem, Rung
from ladder.techniques.within_nodes import WithinNodes

_HOLD_SIZES = ("accelerate", "trl", "torchrun", "sbatch")
"""Exports with accelerate's file, which holds the sizes, or with environment variables."""


class Hybrid(WithinNodes):
    """accelerate's `dp_replicate_size` and `dp_shard_size`, which the Trainer takes from the environment too."""

    name = "hybrid"
    title = "weights divided within a node"
    consent = Consent(
        switch="hybrid",
        help="With several nodes, also try FSDP2 with weights that are divided within each node only.",
        unset="with several nodes, but not in `ladder scale`",
    )
    effects = Effects(divided_in_node=True)
    through = "accelerate"
    why_not = "only FSDP2 on several nodes with the same number of GPUs, two or more, can divide weights within each"

    def suits(self, problem: Problem, rung: Rung) -> bool:
        return super().suits(problem, rung) and rung.stage > 0 and rung.offload_param == "none"

    def environment(self, world_size: int) -> dict[str, str]:
        """Variables for accelerate's ParallelismConfig."""
        sizes = {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in self._sizes(world_size).items()}
        return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **sizes}

    def accelerate_config(self, world_size: int) -> dict[str, Any]:
        sizes = {f"parallelism_config_{name}": size for name, size in self._sizes(world_size).items()}
        return {"parallelism_config": sizes}

    def _sizes(self, world_size: int) -> dict[str, int]:
        return {"dp_replicate_size": world_size // self.ranks, "dp_shard_size": self.ranks}

    def export(self, program: str) -> Export | str:
        if program in _HOLD_SIZES:
            return Export({})
        return (
            "in this answer FSDP2 divides the weights within each node, which only accelerate's file or environment "
            "variables can say; use --for accelerate or torchrun"
        )


HYBRID = Hybrid()
