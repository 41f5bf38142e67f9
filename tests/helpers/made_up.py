"""A technique that does not exist: no moments of Adam's, and half of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ladder.candidates import Consent, Effects, Export, Problem, Rung, Technique
from ladder.registry import Known, Registry


class MadeUp(Technique):
    name = "made-up"
    title = "made-up kernels"
    slot = "kernels"
    consent = Consent(caution="a block is computed by magic (--allow made-up)")
    rank_module = "helpers.made_up_rank"
    effects = Effects(compute=0.5, moment_bytes=0.0)
    why_not = "magic is for causal-lm"
    changes_states = True
    breaks_as_one = True

    def suits(self, problem: Problem, rung: Rung) -> bool:
        return problem.workload.task == "causal-lm"

    def environment(self, world_size: int) -> dict[str, str]:
        return {"MADE_UP": str(world_size)}

    def trainer_arguments(self) -> dict[str, Any]:
        return {"use_made_up": True}

    def export(self, program: str) -> Export | str:
        return "this answer is made up; take --for trainer" if program == "axolotl" else Export({})


MADE_UP = MadeUp()


@contextmanager
def including(registry: Registry[Known], one_more: Known) -> Iterator[None]:
    """Have `one_more` at the end of `registry` for the duration of the block."""
    before = registry._known
    registry._known = {**before, one_more.name: one_more}
    try:
        yield
    finally:
        registry._known = before
