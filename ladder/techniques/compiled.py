"""torch.compile: a model's blocks are compiled once for all of them (by accelerate), or the model as a whole."""

from __future__ import annotations

from typing import Any

from ladder.candidates import Consent, Export, Problem, Rung, Technique
from ladder.machine.host import compiler
from ladder.machine.interpreter import program_found
from ladder.workload.workload import Workload

_DOUBT = 0.25
"""Of the seconds of computing, as a logarithm. Chosen: compiled kernels may be a fifth faster or not faster at all, and
nothing was measured on a GPU."""
_TRAINERS_KEY = "torch_compile"
_CAUTION = (
    "{what} compiled with torch.compile (--allow {name}): the first step of a training takes seconds to minutes "
    "longer, and again when batches get another shape"
)


class Compiled(Technique):
    slot = "compiler"
    rank_module = "ladder.trial.techniques.compiled"
    through = "accelerate"
    breaks_as_one = True
    time_doubt = _DOUBT
    why_not = "only rungs without DeepSpeed are compiled, which --backend all or torch tries"

    def __init__(self, name: str, title: str, what: str, *, by_block: bool) -> None:
        self.name, self.title = name, title
        self.consent = Consent(caution=_CAUTION.format(what=what, name=name))
        self.by_block = by_block

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compiled) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def refusal(self, workload: Workload, device: str) -> str:
        if program_found(compiler()) is not None:
            return ""
        return f"--allow {self.name} needs a C++ compiler (Debian and Ubuntu: apt-get install g++), or leave it out."

    def suits(self, problem: Problem, rung: Rung) -> bool:
        """FSDP2 gathers block by block, in hooks that a model compiled as a whole would not call."""
        return self.by_block or rung.stage == 0

    def environment(self, world_size: int) -> dict[str, str]:
        """accelerate reads these, also in the Trainer, which has no argument for blocks."""
        return {
            "ACCELERATE_DYNAMO_BACKEND": "inductor",
            "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": str(self.by_block).lower(),
        }

    def accelerate_config(self, world_size: int) -> dict[str, Any]:
        return {
            "dynamo_config": {
                "dynamo_backend": "INDUCTOR",
                "dynamo_mode": "default",
                "dynamo_use_regional_compilation": self.by_block,
            }
        }

    def trainer_arguments(self) -> dict[str, Any]:
        return {_TRAINERS_KEY: True}

    def export(self, program: str) -> Export | str:
        return Export({_TRAINERS_KEY: True}) if program == "axolotl" else Export({})


COMPILE = Compiled("compile", "compiled blocks", "the model's blocks are", by_block=True)
COMPILE_WHOLE = Compiled("compile-whole", "a compiled model", "the model is", by_block=False)
