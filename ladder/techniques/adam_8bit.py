"""8-bit Adam: the moments are stored in 8 bits. https://github.com/bitsandbytes-foundation/bitsandbytes"""

from __future__ import annotations

from typing import Any

from ladder.candidates import Consent, Effects, Library, Problem, Rung, Technique
from ladder.optimizers.registry import OPTIMIZERS
from ladder.workload.workload import Workload

MOST_ELEMENTS = 1 << 31
"""A tensor for bitsandbytes 0.50 must have fewer elements: its kernels use 32-bit indices, which wrap silently."""


class Adam8Bit(Technique):
    name = "adam-8bit"
    title = "Adam's moments in 8 bits"
    slot = "numerics"
    consent = Consent(
        caution="Adam's moments are kept in 8 bits (--allow adam-8bit): optimizer steps differ slightly, so compare "
        "the loss with that of an ordinary run before a long one"
    )
    libraries = (Library("bitsandbytes", "bitsandbytes"),)
    rank_module = "ladder.trial.techniques.adam_8bit"
    # bitsandbytes 0.50: one byte per value and an fp32 scale per 256 values.
    effects = Effects(moment_bytes=1.0 + 4 / 256)
    why_not = (
        "moments in 8 bits are for GPUs, without an optimizer offload, and at stages 1 and 2 for less than 2.1 "
        "billion parameters a GPU"
    )
    changes_states = True
    changes_numerics = True

    def refusal(self, workload: Workload, device: str) -> str:
        optimizer = OPTIMIZERS[workload.optimizer]
        if optimizer.in_8_bits:
            return ""
        why = "bitsandbytes does not have in 8 bits" if optimizer.moments else "has no moments"
        return f"--allow {self.name} has no effect with --optimizer {optimizer.name}, which {why}; leave it out."

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """Stages 1 and 2 update a rank's share as one tensor, which may be too long; stage 3 uses smaller ones.

        Not on the CPU: there bitsandbytes makes full fp32 copies and needs more memory than ordinary Adam.
        """
        share = -(-problem.workload.model.num_parameters // problem.world_size)
        is_short = rung.stage == 3 or share < MOST_ELEMENTS
        has_class = bool(OPTIMIZERS[problem.workload.optimizer].in_8_bits)
        return rung.states_on_gpu and has_class and problem.device == "cuda" and is_short

    def configure(self, config: dict[str, Any]) -> None:
        config["zero_allow_untested_optimizer"] = True  # DeepSpeed does not list it as tested with ZeRO

    def trainer_arguments(self) -> dict[str, Any]:
        return {"optim": "adamw_bnb_8bit"}

    def optimizer(self, name: str) -> str:
        return f"bitsandbytes.optim.{OPTIMIZERS[name].in_8_bits}(…)"


ADAM_8BIT = Adam8Bit()
