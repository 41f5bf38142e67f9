"""FP8: torchao's Float8Linear for a model's linear layers, through accelerate's mixed precision of that name.

accelerate leaves the first linear layer and the last one, which is a language model's head, in 16 bits, and those whose
sizes are no multiples of 16. https://huggingface.co/docs/accelerate/usage_guides/low_precision_training
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ladder.candidates import Consent, Effects, Export, Library, Problem, Rung, Technique
from ladder.workload.workload import Workload

_OLDER = re.compile(
    r"\b(A100|A800|A10|A10G|A16|A2|A30|A40|A6000|A5[05]00|A4[05]00|A2000|RTX A\d+|RTX 30[5-9]0|V100\w*|T4|P100|P40|P4|"
    r"M40|M60|K40\w*|K80|GTX|TITAN|RTX 20[678]0|Quadro)\b"
)
"""Names of GPUs with a compute capability below 8.9, where FP8 begins (NVIDIA's tables). A newer one is not listed."""
_COMPILED, _IN_PYTHON = 0.8, 1.1
"""Relative seconds of computing. torchao reports up to 1.25 times the speed for 8 GPUs and 8 billion parameters when
compiled (docs.pytorch.org/ao); otherwise scaling and casting are kernels of their own. The second is chosen. Measured
with 337 million parameters, whose products are small: 0.92 to 0.97 on three H200s, and 2.4 on one without compiling."""
_DOUBT = 0.25
"""Of these, as a logarithm. Chosen: one small model was measured, and no large one."""
_LOSS_TOLERANCE = 0.05
"""Chosen: until the losses of two layers have halved, they differ from those in 16 bits by at most 1.6 % of the first
on a CPU, compiled or not; a training that leaves out a step differs by 12 to 26 % (measured, benchmarks/fp8_losses.py).
"""
_SETTINGS: dict[str, str | bool] = {"backend": "AO", "pad_inner_dim": True, "enable_fsdp_float8_all_gather": False}
"""accelerate's `fp8_config`. Gathering in FP8 makes weights of a class of torchao's that safetensors cannot save: with
DDP, a Trainer's first checkpoint fails (torchao 0.18, transformers 5.23)."""


class Fp8(Technique):
    name = "fp8"
    title = "linear layers in FP8"
    slot = "numerics"
    consent = Consent(
        caution="products of linear layers are computed in FP8 (--allow fp8): they are less exact than in 16 bits, so "
        "compare the loss with that of an ordinary run before a long one; meant to be compiled (--allow compile too)"
    )
    libraries = (Library("torchao", "torchao", since="0.6.1"),)
    rank_module = "ladder.trial.techniques.fp8"
    through = "accelerate"
    why_not = (
        "FP8 needs GPUs of compute capability 8.9 or more (Ada, Hopper, Blackwell), and a rung without DeepSpeed that "
        "offloads nothing"
    )
    breaks_as_one = True
    loss_tolerance = _LOSS_TOLERANCE
    loads_on_all_ranks = True
    # Inputs are saved in 16 bits as ever, and cast once more in backward; of weights no copy is saved.
    effects = Effects(keeps_casts=False, compute=_IN_PYTHON)
    time_doubt = _DOUBT

    def refusal(self, workload: Workload, device: str) -> str:
        if device == "cpu":
            return f"--allow {self.name} needs a GPU that computes in FP8; leave it out."
        if not workload.weights.is_whole:
            return f"--allow {self.name} is for training all weights, not beside frozen ones; leave it out."
        return ""

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """Not with DeepSpeed, whose configuration has `bf16`: the Trainer refuses it where its own argument is off."""
        is_older = problem.gpu_name is not None and _OLDER.search(problem.gpu_name) is not None
        return problem.device == "cuda" and not is_older and not rung.devices

    def effects_beside(self, techniques: Sequence[Technique]) -> Effects:
        is_compiled = any(technique.slot == "compiler" for technique in techniques)
        return replace(self.effects, compute=_COMPILED) if is_compiled else self.effects

    def environment(self, world_size: int) -> dict[str, str]:
        """accelerate reads these, also in the Trainer, which has no argument for FP8."""
        settings = {f"ACCELERATE_FP8_{name.upper()}": _as_text(value) for name, value in _SETTINGS.items()}
        return {"ACCELERATE_MIXED_PRECISION": self.name, **settings}

    def accelerate_config(self, world_size: int) -> dict[str, Any]:
        return {"mixed_precision": self.name, "fp8_config": dict(_SETTINGS)}

    def trainer_arguments(self) -> dict[str, Any]:
        """With `bf16` the Trainer would not ask the environment."""
        return {"bf16": False}

    def export(self, program: str) -> Export | str:
        if program in ("axolotl", "llama-factory", "trl"):
            return f"FP8 through {program} was not tried; use --for trainer, torchrun or accelerate"
        return Export({})


def _as_text(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


FP8 = Fp8()
