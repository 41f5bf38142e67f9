"""Versions of the packages that ranks train with: those of their environment, and those that this ladder works with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ladder import __version__
from ladder.machine.interpreter import python_version, version_of

RANGES = {"torch": ">=2.6", "transformers": ">=4.48,<6", "accelerate": ">=1.6", "deepspeed": ">=0.16"}
"""By package. Chosen: the oldest that computing centres were found to have, and no major version that is unknown."""


def is_within(version: str, specifier: str) -> bool:
    """Whether `version` is among those of `specifier`; False if it is empty or not a standard version number.

    A pre-release counts as its release: NVIDIA's containers have torch 2.10.0a0.
    """
    try:
        return SpecifierSet(specifier).contains(Version(version).base_version)
    except InvalidVersion:
        return False


def versions_of_ranks() -> dict[str, str]:
    """Those of ladder, Python and the packages in `RANGES`; an empty one for what is not installed."""
    return {"ladder": __version__, "python": python_version(), **{name: version_of(name) for name in RANGES}}


def package_versions(others: Iterable[str] = ()) -> dict[str, str]:
    """Versions of the packages that affect measurements, and of `others`, without importing them."""
    found = versions_of_ranks() | {name: version_of(name) for name in others}
    versions = {name: version or "not installed" for name, version in found.items()}
    return {**versions, "optuna": importlib.metadata.version("optuna")}
