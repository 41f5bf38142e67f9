"""Versions of what trials run with."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable

from ladder import __version__

_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "optuna")


def package_versions(others: Iterable[str] = ()) -> dict[str, str]:
    """Versions of the packages that affect measurements, and of `others`, without importing them."""
    versions = {"ladder": __version__, "python": platform.python_version()}
    for name in (*_PACKAGES, *others):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
