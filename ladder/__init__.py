"""ladder: finds, by short real trials, the fastest DeepSpeed configuration that fits.

>>> import ladder
>>> result = ladder.tune(model="tiny-llama", gpus=0)
>>> result.deepspeed_config()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ladder.api import Planned, Tuned, load_best_config, plan, tune, verify
    from ladder.tuning.tune_events import Note, RankReported, SearchBegins, TrialBegins, TrialEnds, TuneEnds, TuneEvent

__version__ = "0.1.0"
__all__ = [
    "Note",
    "Planned",
    "RankReported",
    "SearchBegins",
    "TrialBegins",
    "TrialEnds",
    "TuneEnds",
    "TuneEvent",
    "Tuned",
    "load_best_config",
    "plan",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    """The API, imported when it is first used: `ladder --help` does without what it needs."""
    if name not in __all__:
        raise AttributeError(f"module 'ladder' has no attribute {name!r}")
    from ladder import api

    return getattr(api if hasattr(api, name) else import_module("ladder.tuning.tune_events"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
