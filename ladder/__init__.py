"""ladder: finds, by short real trials, the fastest DeepSpeed configuration that fits.

>>> import ladder
>>> result = ladder.tune(model="tiny-llama", gpus=0)
>>> result.deepspeed_config()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ladder.api import (
        Note,
        Planned,
        RankReported,
        SearchBegins,
        TrialBegins,
        TrialEnds,
        Tuned,
        TuneEnds,
        TuneEvent,
        load_best_config,
        plan,
        tune,
        verify,
    )

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

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
