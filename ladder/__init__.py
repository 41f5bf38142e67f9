"""ladder: finds, by short real trials, the fastest DeepSpeed configuration that fits.

>>> import ladder
>>> result = ladder.tune(model="tiny-llama", gpus=0)
>>> result.deepspeed_config()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ladder.api import load_best_config, load_run, plan, scale, tune, verify
    from ladder.errors import (
        EnvironmentFaultError,
        FewerStepsThanPlannedError,
        LadderError,
        ModelNotAccessibleError,
        MoreMemoryThanPromisedError,
        NothingFitsError,
        SlowerThanPromisedError,
        UsageError,
    )
    from ladder.results import Planned, Scaled, Tuned
    from ladder.tuning.tune_events import Note, RankReported, SearchBegins, TrialBegins, TrialEnds, TuneEnds, TuneEvent

__version__ = "0.1.0"
__all__ = [
    "EnvironmentFaultError",
    "FewerStepsThanPlannedError",
    "LadderError",
    "ModelNotAccessibleError",
    "MoreMemoryThanPromisedError",
    "Note",
    "NothingFitsError",
    "Planned",
    "RankReported",
    "Scaled",
    "SearchBegins",
    "SlowerThanPromisedError",
    "TrialBegins",
    "TrialEnds",
    "TuneEnds",
    "TuneEvent",
    "Tuned",
    "UsageError",
    "load_best_config",
    "load_run",
    "plan",
    "scale",
    "tune",
    "verify",
]
_ERRORS = {name for name in __all__ if name.endswith("Error")}


def __getattr__(name: str) -> Any:
    """Import the API when it is first used, so that `ladder --help` is fast."""
    if name not in __all__:
        raise AttributeError(f"module 'ladder' has no attribute {name!r}")
    if name in _ERRORS:
        return getattr(import_module("ladder.errors"), name)
    from ladder import api

    return getattr(api if hasattr(api, name) else import_module("ladder.tuning.tune_events"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
