"""The versions that all nodes of a trial must share."""

from __future__ import annotations

from ladder import __version__
from ladder.machine.interpreter import python_version, version_of

_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")


def software() -> dict[str, str]:
    """By name; an empty version for what is not installed."""
    return {"oom-ladder": __version__, "python": python_version(), **{name: version_of(name) for name in _PACKAGES}}
