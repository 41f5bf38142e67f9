"""The script's own options that set its micro-batch and its accumulation, as its parser of arguments knows them.

A loop of its own may compute its steps, its schedule and its epochs from them. So it is told another micro-batch in
these words, and not behind its back.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ladder.trial.wrapping import wrap

KNOWN_OPTIONS = {"micro_batch": "per_device_train_batch_size", "accumulation": "gradient_accumulation_steps"}
"""By what they set: as TrainingArguments calls them, and scripts that follow it."""


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


def setting(parsed: Mapping[str, int], seen: Mapping[str, int]) -> dict[str, str]:
    """The options of KNOWN_OPTIONS that have the value that was seen in the training, by what they set."""
    found = {option.lstrip("-").replace("-", "_"): option for option in parsed}
    named = {what: found[name] for what, name in KNOWN_OPTIONS.items() if name in found}
    return {what: option for what, option in named.items() if parsed[option] == seen[what]}
