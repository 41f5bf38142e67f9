"""hpZ: each node keeps a copy of stage 3's weights, so most gathering stays inside it (ZeRO++, arXiv 2306.10209)."""

from __future__ import annotations

from typing import Any

from ladder.candidates import Consent, Effects, Problem, Rung
from ladder.techniques.within_nodes import WithinNodes
from ladder.workload.workload import Workload


class Hpz(WithinNodes):
    """DeepSpeed's `zero_hpz_partition_size`.

    The copy of a weight is made when it is released after its first use, and dropped by the optimizer step
    (partition_parameters.py, stage3.py). So only the first forward pass of a step gathers from other nodes.
    """

    name = "hpz"
    title = "a copy of the weights in each node"
    consent = Consent(
        caution="each node keeps a copy of the weights (--allow hpz): on CPU ranks it trained like stage 3 without "
        "copies, and it was not tried on GPUs, so compare the loss with that of an ordinary run before a long one; "
        "your training may build one model only, because DeepSpeed fails at the second"
    )
    rank_module = "ladder.trial.techniques.hpz"
    effects = Effects(copied_in_node=True)
    why_not = (
        "it keeps a copy of the weights in each node at stage 3 with its parameters on the GPU, and needs several "
        "nodes with the same number of GPUs, two or more"
    )
    first_differs = True

    def refusal(self, workload: Workload, device: str) -> str:
        """In trials of a script, all micro-steps without the optimizer count as equal."""
        if workload.script is not None:
            return f"--allow {self.name} is not tried with scripts of your own; leave it out."
        if workload.load_in is not None:
            return f"--allow {self.name} keeps 16-bit copies, and quantised weights have none; leave one of them out."
        return ""

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """With parameters on the host, DeepSpeed would keep the copy there too."""
        return super().suits(problem, rung) and rung.stage == 3 and rung.offload_param == "none"

    def configure(self, config: dict[str, Any]) -> None:
        config["zero_optimization"]["zero_hpz_partition_size"] = self.ranks


HPZ = Hpz()
