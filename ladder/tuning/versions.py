"""Versions of what trials run with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from ladder import __version__
from ladder.machine.interpreter import python_version, version_of

_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")


def package_versions(others: Iterable[str] = ()) -> dict[str, str]:
    """Versions of the packages that affect measurements, and of `others`, without importing them."""
    versions = {name: version_of(name) or "not installed" for name in (*_PACKAGES, *others)}
    return {
        "ladder": __version__,
        "python": python_version(),
        **versions,
        "optuna": importlib.metadata.version("optuna"),
    }
