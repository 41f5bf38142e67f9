"""The errors a user can meet: one sentence saying what happened and what to do, and the exit code that goes with it."""

from __future__ import annotations

EXIT_FOUND = 0
"""Defined by every shell: success."""
EXIT_BUG = 1
"""Chosen: as Python exits after an exception that nobody caught."""


class LadderError(Exception):
    """Base of every expected failure; `exit_code` is what the command line returns."""

    exit_code = EXIT_BUG


class UsageError(LadderError):
    """The request contradicts itself or cannot be met as asked."""

    exit_code = 2


class NothingFitsError(LadderError):
    """Every candidate was tried or ruled out and none fits."""

    exit_code = 3


class EnvironmentFaultError(LadderError):
    """The machine is not in a state to run trials (a full GPU, no compiler, an unwritable folder)."""

    exit_code = 4


class ModelNotAccessibleError(LadderError):
    """The model's configuration cannot be read, or must not be used."""

    exit_code = 5


class SlowerThanPromisedError(LadderError):
    """What was proven still fits, but is slower than its file promises, by more than the tolerance."""

    exit_code = 6
