"""Gradients that DeepSpeed does not check for infinity before a step, as DDP and FSDP2 never do."""

from __future__ import annotations

from typing import Any

from ladder.candidates import Consent, Effects, Problem, Rung, Technique

_LEFT = 0.46
"""Host work of a step that is left for each tensor. Measured: without the check, steps of RoBERTa-base and opt-125m on
H200 are shorter by 0.06 to 0.17 ms a tensor (benchmarks/results/compare), on two of three hosts by 0.14 of 0.26."""
_LEFT_ON_A_CPU = 0.42
"""The same, measured on a CPU with 202 tensors (tests/contracts/test_gradient_check.py counts what is launched)."""
_DOUBT = 0.03
"""Of the seconds of a step, as a logarithm. Derived: 0.03 ms a tensor, in steps of 0.15 s, as the above differs."""
_SMALL = 500e6
"""Parameters of a model up to which a user hears of it. Chosen: the check took 9 to 22 % of steps of RoBERTa-base and
opt-125m, and would take 2 % of one of Llama-3.2-1B."""


class UncheckedGradients(Technique):
    name = "unchecked-gradients"
    title = "no check for infinite gradients"
    slot = "host"
    consent = Consent(
        caution="DeepSpeed no longer skips a step whose gradients are infinite or NaN (--allow "
        "unchecked-gradients): one such step ruins the weights, so watch the loss and save often"
    )
    why_not = "DeepSpeed can leave its check out only at stages 1 and 2 in bf16, without an optimizer offload"
    needs_bf16 = True  # fp16 needs the check for its loss scale
    leaves_work_out = True
    effects = Effects(tensor_step=_LEFT)
    time_doubt = _DOUBT

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """At stage 3 and with offload DeepSpeed looks at gradients in any case."""
        return rung.states_on_gpu and rung.stage < 3

    def advice(self, problem: Problem, *, installed: bool) -> str:
        if problem.device == "cpu" or problem.workload.weights.total > _SMALL:
            return ""
        return (
            "With a model as small as this one, DeepSpeed's check for infinite gradients may take a fifth of a step; "
            "--allow unchecked-gradients also tries without it."
        )

    def configure(self, config: dict[str, Any]) -> None:
        config["bf16"]["check_grad_overflow"] = False


UNCHECKED_GRADIENTS = UncheckedGradients()
