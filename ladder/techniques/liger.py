"""Liger's kernels: Triton kernels that fuse norms, gates and the loss. https://github.com/linkedin/Liger-Kernel"""

from __future__ import annotations

from typing import Any

from ladder.candidates import Consent, Effects, Export, Library, Problem, Rung, Technique
from ladder.workload.workload import Workload

_LARGE_VOCABULARY = 100_000
"""From this vocabulary size on, installing it is recommended. Chosen: with fewer tokens, logits rarely set the peak."""
_COMPUTE_DOUBT = 0.05
"""The uncertainty of the seconds of computing. Chosen."""
_MOVED_BY_LOSS = 14.0
"""Bytes moved for each logit. Measured: chosen so that eleven answers for Llama with 1 and 7 billion parameters on one
H200, LoRA and QLoRA among them, are predicted within 10 % (benchmarks/results/1xh200-adapters)."""
# Everything that axolotl's plugin can switch on for a Llama-like model, as the Trainer's `use_liger_kernel` does.
_AXOLOTL = ("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_fused_linear_cross_entropy")


class Liger(Technique):
    name = "liger"
    title = "Liger's kernels"
    slot = "kernels"
    consent = Consent(
        switch="liger", help="Try each rung on Liger's kernels too.", unset="where liger-kernel is installed"
    )
    libraries = (Library("liger-kernel", "liger_kernel"),)
    rank_module = "ladder.trial.techniques.liger"
    # liger-kernel 0.8: RMSNorm saves its 16-bit input (2 of 6 bytes per value), SwiGLU recomputes the activated gate,
    # the loss is fused with the head.
    effects = Effects(norm_keeps=1 / 3, keeps_gate=False, chunked_loss=True, moved_by_loss=_MOVED_BY_LOSS)
    time_doubt = _COMPUTE_DOUBT
    through = "model"
    changes_blocks = True
    replaces_kernels = True
    breaks_as_one = True
    loss_doubt = ("logits:liger", 0.2)  # measured candidates never had their peak there

    def refusal(self, workload: Workload, device: str) -> str:
        if not self._knows(workload):
            return (
                f"The installed liger-kernel has no kernels for {workload.model.model_type} as {workload.task}; "
                "leave out --liger."
            )
        return "Liger's kernels need a GPU; leave out --liger." if device == "cpu" else ""

    def suits(self, problem: Problem, rung: Rung) -> bool:
        return problem.device == "cuda" and self._knows(problem.workload)

    def advice(self, problem: Problem, *, installed: bool) -> str:
        if installed:
            return "Liger's kernels are installed, so each rung is also tried with them (--no-liger leaves them out)."
        vocabulary = problem.workload.model.vocab_size
        if vocabulary < _LARGE_VOCABULARY:
            return ""
        return (
            f"With a vocabulary of {vocabulary:,} tokens, Liger's kernels, which do not keep logits, "
            "may be much faster; `pip install liger-kernel` to try them."
        )

    def environment(self, world_size: int) -> dict[str, str]:
        """Triton keeps the variant that it found fastest: 198 s of the first step of a mixture of 32 experts on one
        H200, and 1 s once it is kept (liger-kernel 0.8.5)."""
        return {"TRITON_CACHE_AUTOTUNING": "1"}

    def trainer_arguments(self) -> dict[str, Any]:
        return {"use_liger_kernel": True}

    def first_call(self) -> str:
        """Scripts without the Trainer, which has `use_liger_kernel`, call this."""
        return "transformers.integrations.liger.apply_liger_kernel(model, None)"

    def export(self, program: str) -> Export | str:
        if program == "axolotl":
            plugin = "axolotl.integrations.liger.LigerPlugin"
            return Export({"plugins": [plugin], **dict.fromkeys(_AXOLOTL, True)})
        if program == "llama-factory":
            return Export({"use_liger_kernel": None, "enable_liger_kernel": True})
        return Export({})

    def _knows(self, workload: Workload) -> bool:
        return workload.task == "causal-lm" and self.block_of(workload.model) is not None


LIGER = Liger()
