"""Gradients that FSDP2 divides in every micro-step, where it otherwise keeps whole ones until the last.

accelerate's `sync_each_batch`: less memory by the gradients of all that is trained, for a reduction in each micro-step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ladder.candidates import Candidate, Consent, Effects, Engine, Export, Library, Problem, Rung, Technique
from ladder.techniques.worth import SURE, WORTH


class DividedGradients(Technique):
    name = "divided-gradients"
    title = "gradients divided in every micro-step"
    slot = "gradients"
    consent = Consent(
        switch="divided-gradients",
        help="With FSDP2, also try to divide gradients in every micro-step, which needs less memory.",
        unset="where whole gradients take much of the memory",
    )
    libraries = (Library("transformers", "transformers", since="5.2"),)
    rank_module = "ladder.trial.techniques.divided_gradients"
    through = "accelerate"
    changes_states = True
    why_not = "only FSDP2 on several ranks keeps whole gradients, and only if it accumulates"
    effects = Effects(divides_gradients=True)
    is_tried_everywhere = False
    only_accumulates = True

    def suits(self, problem: Problem, rung: Rung) -> bool:
        return rung.stage > 0 and problem.world_size > 1

    def engines(self, problem: Problem, engines: Sequence[Engine], peak: Callable[[Candidate], int]) -> list[Engine]:
        """Engines that may not fit without it or need much more, with one sequence at a time."""
        accumulation, limit = problem.workload.global_batch_size // problem.world_size, problem.memory_limit
        found = []
        for engine in engines:
            if accumulation < 2 or engine.has_slot_of(self) or not self.gets_into(engine.rung, problem):
                continue
            whole, divided = (peak(Candidate(each, 1, 1, accumulation)) for each in (engine, engine.having(self)))
            least = 0 if whole > SURE * limit else WORTH * limit
            if divided <= limit and whole - divided > least:
                found.append(engine.having(self))
        return found

    def trainer_arguments(self) -> dict[str, Any]:
        return {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}

    def first_call(self) -> str:
        plugin = "accelerate.utils.GradientAccumulationPlugin(num_steps=…, sync_each_batch=True)"
        return f"accelerate.Accelerator(gradient_accumulation_plugin={plugin})"

    def export(self, program: str) -> Export | str:
        if program in ("accelerate", "axolotl", "llama-factory"):
            return (
                f"in this answer FSDP2 divides gradients in every micro-step, which {program}'s file cannot say; use "
                "--for trainer or torchrun"
            )
        return Export({})


DIVIDED_GRADIENTS = DividedGradients()
