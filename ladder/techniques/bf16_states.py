"""Master weights and Adam's moments in bf16, which DeepSpeed supports from stage 1 on."""

from __future__ import annotations

from typing import Any

from ladder.candidates import Consent, Effects, Problem, Rung, Technique


class Bf16States(Technique):
    name = "bf16-states"
    title = "states in bf16"
    slot = "numerics"
    consent = Consent(
        caution="master weights and optimizer states are kept in bf16 (--allow bf16-states): small updates are "
        "rounded away, so compare the loss with that of an ordinary run before a long one"
    )
    why_not = "no rung that is tried keeps optimizer states on the GPU"
    # DeepSpeed's bf16_master_weights_and_grads with bf16_optimizer_states.
    effects = Effects(master_bytes=2.0, moment_bytes=2.0, gradient_bytes=0.0)
    needs_bf16 = True
    changes_states = True
    changes_numerics = True

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """Not with an offloaded optimizer: DeepSpeed needs one then that neither the Trainer nor accelerate creates."""
        return rung.states_on_gpu

    def configure(self, config: dict[str, Any]) -> None:
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


BF16_STATES = Bf16States()
