"""The options of generating (`--task generate`), and which of a tune's others have a meaning there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from ladder.errors import UsageError
from ladder.generating.ways import BATCHES, GENERATE, WAYS
from ladder.tuning.declaring import Option, declared, spread
from ladder.tuning.option_kinds import whole

GENERATION = "Generating (--task generate)"
PROMPT_LEN, NEW_TOKENS = 512, 128
"""Chosen: a page of text, and a paragraph of answer."""
_HEEDED = frozenset(
    {"model", "task", "dtype", "python", "load_in", "allow", "gpus", "gpu_memory", "host_memory", "nvme_path", "wait"}
    | {"cold", "run_dir", "output", "prompt_len", "new_tokens", "batches", "ways", "machine", "launcher"}
)
"""The options of tune and plan that have an effect on generating. A launcher or machine of paper is refused by name."""


def _names() -> list[str]:
    return [way.name for way in WAYS]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What is generated, and how the model may be held for it."""

    prompt_len: Annotated[int | None, Option("Tokens of a prompt.", GENERATION, whole(1), unset=str(PROMPT_LEN))] = None
    new_tokens: Annotated[
        int | None, Option("Tokens that are generated.", GENERATION, whole(2), unset=str(NEW_TOKENS))
    ] = None
    batches: Annotated[
        tuple[int, ...],
        Option(
            f"Generate for this many prompts at once; may be given several times. [default: doubled up to "
            f"{BATCHES[-1]} as long as it is faster]",
            GENERATION,
            whole(1),
            flag="--batch",
        ),
    ] = ()
    ways: Annotated[
        tuple[str, ...],
        Option(
            f"Hold the model only in this way: {', '.join(_names())}. May be given several times.",
            GENERATION,
            flag="--way",
            metavar="NAME",
            names=_names,
        ),
    ] = ()


_OWN = ("prompt_len", "new_tokens", "batches", "ways")


def require_training(options: Any) -> None:
    """UsageError where training is meant, for the task of generating and for its options."""
    if options.task == GENERATE:
        raise UsageError(
            f"--task {GENERATE} trains nothing; `ladder tune MODEL --task {GENERATE}` and `ladder plan` take it."
        )
    known = declared(type(options))
    for name in _OWN:
        if name in known and getattr(options, name):
            raise UsageError(f"{known[name].flag} is about generating; add --task {GENERATE}, or leave it out.")


def require_effective(options: Any) -> None:
    """UsageError for an option that would have no effect on generating: nothing is silently ignored."""
    if options.script:
        raise UsageError(f"A script that generates cannot be tuned yet; name its MODEL with --task {GENERATE}.")
    if not options.model:
        raise UsageError(f"Name a MODEL, such as: ladder tune tiny-llama --task {GENERATE}.")
    known, values = declared(type(options)), spread(options)
    for name, each in known.items():
        usual = () if each.several else each.default
        if name not in _HEEDED and values[name] != usual:
            raise UsageError(f"{each.flag} has no effect with --task {GENERATE}; leave it out.")
