"""Adam's moments in 8 bits. https://github.com/bitsandbytes-foundation/bitsandbytes"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ladder.candidates import Candidate, Consent, Effects, Library, Problem, Rung, Technique, Terms
from ladder.workload.workload import Workload

MOST_ELEMENTS = 1 << 31
"""Of a tensor that bitsandbytes 0.50 updates there are fewer: its kernels count in 32 bits, and wrap silently."""
_CALLS = {"adamw": "bitsandbytes.optim.AdamW8bit(…)", "adam": "bitsandbytes.optim.Adam8bit(…)"}


class Adam8Bit(Technique):
    name = "adam-8bit"
    title = "Adam's moments in 8 bits"
    slot = "numerics"
    consent = Consent(
        caution="Adam's moments are kept in 8 bits, as --allow adam-8bit permits: steps are a little longer or "
        "shorter, so hold the loss against that of an ordinary run before a long one"
    )
    libraries = (Library("bitsandbytes", "bitsandbytes"),)
    rank_module = "ladder.trial.techniques.adam_8bit"
    # bitsandbytes 0.50: a byte a value and an fp32 scale for each 256 of them; it looks each value up in a table.
    effects = Effects(moment_bytes=1.0 + 4 / 256, update_passes=1.15)
    why_not = (
        "moments in 8 bits are for GPUs, without an optimizer offload, and at stages 1 and 2 for less than 2.1 "
        "billion parameters a GPU"
    )
    changes_states = True
    changes_numerics = True

    def refusal(self, workload: Workload, device: str) -> str:
        if workload.optimizer != "sgd":
            return ""
        return f"--allow {self.name} has no effect with --optimizer sgd, which has no moments of Adam's."

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """Stages 1 and 2 update a rank's share as one tensor, which can be too long; stage 3 does it in pieces.

        On the CPU bitsandbytes computes with whole copies in fp32, and takes more memory than usual moments.
        """
        share = -(-problem.workload.model.num_parameters // problem.world_size)
        is_short = rung.stage == 3 or share < MOST_ELEMENTS
        return rung.states_on_gpu and problem.workload.optimizer != "sgd" and problem.device == "cuda" and is_short

    def configure(self, config: dict[str, Any]) -> None:
        config["zero_allow_untested_optimizer"] = True  # it is not among those that DeepSpeed tried with ZeRO

    def costs(self, terms: Terms, workload: Workload, candidate: Candidate, world_size: int) -> Terms:
        """A byte each, and a scale in fp32 for each 256 elements; 48 bytes of traffic (derived as the usual 60)."""
        return replace(terms, moment=1 + 4 / 256, update_traffic=48.0)

    def trainer_arguments(self) -> dict[str, Any]:
        return {"optim": "adamw_bnb_8bit"}

    def optimizer(self, name: str) -> str:
        return _CALLS[name]


ADAM_8BIT = Adam8Bit()
