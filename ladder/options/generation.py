"""The options of generating (`--task generate`), and which of a tune's others have a meaning there."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from ladder.errors import UsageError
from ladder.generating.ways import BATCHES, GENERATE, WAYS_BY_NAME
from ladder.options.declaring import Option, declared, spread
from ladder.options.kinds import whole

GENERATION = "Generating (--task generate)"
PROMPT_LEN, NEW_TOKENS = 512, 128
"""Chosen: a page of text, and a paragraph of answer."""
_HEEDED = "model task dtype python load_in allow gpus gpu_memory host_memory nvme_path wait cold run_dir output machine"
"""Options of tune and plan that have an effect on generating."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What is generated, and how the model may be held for it."""

    prompt_len: Annotated[int | None, Option("Tokens of a prompt.", GENERATION, whole(1), unset=str(PROMPT_LEN))] = None
    new_tokens: Annotated[int | None, Option("Tokens to generate.", GENERATION, whole(2), unset=str(NEW_TOKENS))] = None
    batches: Annotated[
        tuple[int, ...],
        Option(
            "Generate for this many prompts at once; may be given several times.",
            GENERATION,
            whole(1),
            flag="--batch",
            unset=f"doubled up to {BATCHES[-1]} as long as it is faster",
        ),
    ] = ()
    ways: Annotated[
        tuple[str, ...],
        Option(
            f"Hold the model only in this way: {', '.join(WAYS_BY_NAME)}. May be given several times.",
            GENERATION,
            flag="--way",
            metavar="NAME",
            names=WAYS_BY_NAME.keys,
        ),
    ] = ()


_OWN = [field.name for field in fields(GenerationOptions)]


def require_training(options: Any) -> None:
    """UsageError where training is meant, for the task of generating and for its options."""
    if options.task == GENERATE:
        raise UsageError(f"--task {GENERATE} trains nothing; only `ladder tune` and `ladder plan` take it, of a MODEL.")
    known = declared(type(options))
    for name in _OWN:
        if name in known and getattr(options, name):
            raise UsageError(f"{known[name].flag} is about generating; add --task {GENERATE}, or leave it out.")


def require_effective(options: Any) -> None:
    """UsageError for an option that would have no effect on generating: nothing is silently ignored."""
    if options.script or not options.model:
        raise UsageError(f"Name a MODEL for --task {GENERATE}; a script that generates cannot be tuned yet.")
    values = spread(options)
    for name, each in declared(type(options)).items():
        if name not in _HEEDED.split() and name not in _OWN and values[name] != (() if each.several else each.default):
            raise UsageError(f"{each.flag} has no effect with --task {GENERATE}; leave it out.")
