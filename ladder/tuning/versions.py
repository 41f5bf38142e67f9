"""Versions of what trials run with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from ladder.machine.interpreter import version_of
from ladder.machine.versions import versions_of_ranks


def package_versions(others: Iterable[str] = ()) -> dict[str, str]:
    """Versions of the packages that affect measurements, and of `others`, without importing them."""
    found = versions_of_ranks() | {name: version_of(name) for name in others}
    versions = {name: version or "not installed" for name, version in found.items()}
    return {**versions, "optuna": importlib.metadata.version("optuna")}
