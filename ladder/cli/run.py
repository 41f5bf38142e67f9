"""`ladder run`: the user's own script, unchanged, with the settings of an answer."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ladder.cli.declared import takes
from ladder.errors import EXIT_FOUND
from ladder.options.answer import RunOptions
from ladder.options.declaring import Option, checked


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What is run with."""

    config: Annotated[Path, Option("The answer of a tune.", is_argument=True)] = Path("best_config.json")


@takes(Answered, RunOptions)
def run(answered: Answered, options: RunOptions) -> int:
    """Start your own training script, unchanged, on all GPUs of the answer and with its settings.

    The answer decides on DeepSpeed, micro-batch, accumulation and checkpointing; the rest stays as the script says.
    The exit code is 0 if the training succeeds and 1 if a rank fails.

    Examples:

      ladder run best_config.json

      ladder run best_config.json --step-down -- train.py --learning_rate 1e-5
    """
    from ladder.cli.extra_copies import said_to_extra_copy
    from ladder.emit.config import SECTION, load_best_config
    from ladder.tuning.script_run import run_script
    from ladder.watch.plain import plain_lines

    is_for_one = load_best_config(answered.config)[SECTION]["num_nodes"] == 1
    if is_for_one and (extra := said_to_extra_copy(os.environ)) is not None:
        print(f"ladder: {extra}", file=sys.stderr)
        return EXIT_FOUND  # with another code, `srun --kill-on-bad-exit` would end the copy that works
    return run_script(answered.config, checked(options), plain_lines)
