"""The script's own options that set its micro-batch and its accumulation, as its parser of arguments knows them.

A loop of its own may compute its steps, its schedule and its epochs from them. So it is told another micro-batch in
these words, and not behind its back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ladder.trial.script.seen import TrainsOtherwiseError
from ladder.trial.wrapping import wrap
from ladder.workload.script import KNOWN_OPTIONS, ScriptFacts


def note_options(parsed: dict[str, int]) -> None:
    """From now on `parsed` has the whole numbers that argparse finds, by option. HfArgumentParser is built on it."""

    def noted(own: Any, parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Any:
        found = own(parser, *arguments, **options)
        for action in parser._actions:
            value = getattr(found[0], action.dest, None)
            if action.option_strings and isinstance(value, int) and not isinstance(value, bool):
                parsed[max(action.option_strings, key=len)] = value
        return found

    wrap(argparse.ArgumentParser, "parse_known_args", noted)


def has_trainer_options(parsed: Mapping[str, int]) -> bool:
    """Whether the parser of a Trainer's script has all that TrainingArguments has, as HfArgumentParser makes them."""
    return {f"--{name}" for name in KNOWN_OPTIONS.values()} <= parsed.keys()


def setting(parsed: Mapping[str, int], facts: ScriptFacts) -> dict[str, str]:
    """The options of KNOWN_OPTIONS that have the value that was seen in the training, by what they set."""
    found = {option.lstrip("-").replace("-", "_"): option for option in parsed}
    seen = {"micro_batch": facts.micro_batch, "accumulation": facts.accumulation}
    named = {what: found[name] for what, name in KNOWN_OPTIONS.items() if name in found}
    return {what: option for what, option in named.items() if parsed[option] == seen[what]}


def told_otherwise(told: int, made: int | None) -> TrainsOtherwiseError:
    """Of a script whose loader does not have the micro-batch that an option said."""
    return TrainsOtherwiseError(
        f"the script was told a micro-batch of {told} by its own option, and its loader has {made}; name the option "
        "that sets it: --map micro_batch=--OPTION"
    )


def guard_length(loader: Any, leave: Callable[[BaseException], Any]) -> None:
    """From now on `leave` is called where the script itself asks for the length of `loader`, which ladder changed."""

    def counted(own: Any, each: Any) -> int:
        if each is loader and not _asked_by_a_library():
            leave(
                TrainsOtherwiseError(
                    "its loop computes with the number of its batches, which another micro-batch changes; name the "
                    "options that set its micro-batch and accumulation, so that it computes with the right ones: "
                    "--map micro_batch=--OPTION --map accumulation=--OPTION"
                )
            )
        return int(own(each))

    wrap(type(loader), "__len__", counted)


def _asked_by_a_library() -> bool:
    """Whether the code that called us, ours left out, is installed; progress bars and accelerate are."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("ladder.trial."):
        frame = frame.f_back
    return any(folder in Path(frame.f_code.co_filename).parts for folder in ("site-packages", "dist-packages"))
