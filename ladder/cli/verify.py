"""`ladder verify`: checks that a best_config.json still holds after an upgrade or on another machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ladder.cli.declared import takes
from ladder.cli.tune import TuneShown
from ladder.errors import EXIT_FOUND, LadderError
from ladder.options.answer import VerifyOptions
from ladder.options.declaring import Option

if TYPE_CHECKING:
    from ladder.tuning.verified import Verification


@dataclass(frozen=True, kw_only=True)
class Promised:
    """What to verify."""

    config: Annotated[Path, Option("A best_config.json.", is_argument=True)] = Path("best_config.json")


@takes(Promised, VerifyOptions, TuneShown)
def verify(promised: Promised, options: VerifyOptions, shown: TuneShown) -> int:
    """Run the proof of fit again, and compare speed and memory with what the file promises.

    Ends with status 0 if it holds, 2 if your script fails or trains otherwise than the file says, 3 if it no longer
    fits, 6 if it is slower than the tolerance allows, 7 if its tensors take more memory than promised.

    Examples:

      ladder verify best_config.json

      ladder verify best_config.json --minutes 30 --tolerance 0.1

      ladder verify best_config.json -- train.py --learning_rate 1e-5
    """
    from ladder.cli.tune_result import error_as_json
    from ladder.tuning.interruption import InterruptedVerificationError, interruptible
    from ladder.tuning.tune_events import ignore
    from ladder.tuning.verification import run_verification
    from ladder.watch.plain import plain_lines

    with interruptible() as interruption:
        try:
            done = run_verification(promised.config, options, ignore if shown.quiet else plain_lines, interruption)
        except InterruptedVerificationError:
            return interruption.exit_code
        except LadderError as error:
            if shown.output_format == "json":
                typer.echo(error_as_json(error))
            raise
    typer.echo(_as_json(done) if shown.output_format == "json" else f"{done.candidate_key}: {done.sentence()}.")
    done.require()
    return EXIT_FOUND


def _as_json(done: Verification) -> str:
    from ladder.units import gib

    seen = done.record.measurement
    document = {
        "candidate": done.candidate_key,
        "fits": done.fits,
        "holds": done.holds,
        "outcome": done.record.outcome.kind,
        "sentence": done.sentence(),
        "tokens_per_second": {
            "promised": done.promised_tokens_per_second,
            "promised_range": done.promised_range,
            "seen": done.record.tokens_per_second,
        },
        "peak_device_gib": {
            "promised": gib(done.promised_device_bytes),
            "seen": gib(seen.peak_device) if seen else None,
            "limit": gib(done.memory_limit),
        },
        "peak_allocated_gib": {
            "promised": gib(done.promised_allocated_bytes),
            "seen": gib(seen.peak_allocated) if seen else None,
        },
        "joules_per_token": done.record.joules_per_token,
        "optimizer_steps": seen.num_steps if seen else 0,
        "tolerance": done.tolerance,
        "seconds": round(done.seconds, 1),
    }
    return json.dumps(document, indent=2)
