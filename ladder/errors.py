"""The errors that a user can see: each has one sentence, which says what happened and what to do, and an exit code."""

from __future__ import annotations

EXIT_FOUND = 0
"""Defined by POSIX: success."""
EXIT_BUG = 1
"""Chosen: the exit code of Python after an uncaught exception."""


class LadderError(Exception):
    """Base class of all expected failures; the command line returns `exit_code`."""

    exit_code = EXIT_BUG


class UsageError(LadderError):
    """The options contradict each other or cannot be met."""

    exit_code = 2


class NothingFitsError(LadderError):
    """Every candidate was tried or ruled out, and none fits."""

    exit_code = 3


class EnvironmentFaultError(LadderError):
    """The machine is not in a state to run trials (a full GPU, no compiler, an unwritable folder)."""

    exit_code = 4


class ModelNotAccessibleError(LadderError):
    """The model's configuration cannot be read, or must not be used."""

    exit_code = 5


class SlowerThanPromisedError(LadderError):
    """The answer still fits, but is slower than its file promises by more than the tolerance."""

    exit_code = 6


class MoreMemoryThanPromisedError(LadderError):
    """The answer still fits, but its tensors take more memory than its file promises."""

    exit_code = 7


class FewerStepsThanPlannedError(LadderError):
    """A training under the answer ended with fewer optimizer steps than the script makes by itself."""

    exit_code = 8
