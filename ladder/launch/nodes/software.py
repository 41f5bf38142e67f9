"""The versions that all nodes of a trial must share."""

from __future__ import annotations

import importlib.metadata
import platform

_PACKAGES = ("oom-ladder", "torch", "deepspeed", "transformers", "accelerate")


def software() -> dict[str, str]:
    """By name; an empty version for what is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
