"""Gradients that DeepSpeed does not check for infinity before a step, as DDP and FSDP2 never do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ladder.candidates import Candidate, Consent, Effects, Problem, Rung, Technique, Terms
from ladder.workload.workload import Workload

_LEFT = 0.77
"""Host work of a step that is left for each tensor. Derived: a tensor takes 260 µs in steps on GPUs, and the check took
61 of 106 on a CPU, where it starts 13 of the 15 kernels."""
_LEFT_ON_A_CPU = 0.42
"""The same, measured on a CPU with 202 tensors (tests/contracts/test_gradient_check.py counts what is launched)."""
_DOUBT = 0.03
"""Of the seconds of a step, as a logarithm. Chosen: what is saved was not measured by switching it off on a GPU."""


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
    effects = Effects(tensor_step=_LEFT_ON_A_CPU)

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """At stage 3 and with offload DeepSpeed looks at gradients in any case."""
        return rung.states_on_gpu and rung.stage < 3

    def configure(self, config: dict[str, Any]) -> None:
        config["bf16"]["check_grad_overflow"] = False

    def costs(self, terms: Terms, workload: Workload, candidate: Candidate, world_size: int) -> Terms:
        """A fraction of the host's work in an optimizer step."""
        return replace(terms, tensor_step=_LEFT, doubts=(*terms.doubts, (self.name, _DOUBT)))


UNCHECKED_GRADIENTS = UncheckedGradients()
