"""Skipped tests by reason. A reason that is not listed here, or that is untrue of this machine, fails the run."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from ctypes.util import find_library

import pytest

from ladder.machine.gpus import visible_gpus
from ladder.machine.host import compiler


def _is_missing(*programs: str) -> bool:
    return all(shutil.which(program) is None for program in programs)


def _is_true_of_the_kernel(_: re.Match[str]) -> bool:
    """The test itself has asked the kernel, which alone can say."""
    return True


_GPUS = {"a": 1, "two": 2, "four": 4}
_EXPECTED: dict[str, Callable[[re.Match[str]], bool]] = {
    r"needs (a|two|four) CUDA GPUs?": lambda said: len(visible_gpus()) < _GPUS[said[1]],
    r"this torch is built for CUDA": lambda _: bool(visible_gpus()),
    r"needs gcc.*": lambda _: _is_missing("gcc"),
    r"there is no \S+ to build .*": lambda _: _is_missing(compiler()),
    r"no Chromium is installed .*": lambda _: _is_missing("chromium", "chromium-browser", "google-chrome"),
    r".*needs root and Debian's .*": lambda _: os.geteuid() != 0 or _is_missing("slurmctld") or _is_missing("sshd"),
    r"only root can .*": lambda _: os.geteuid() != 0,
    r"root may write anywhere": lambda _: os.geteuid() == 0,
    r"could not import '([\w.]+)'.*": lambda said: importlib.util.find_spec(said[1].partition(".")[0]) is None,
    r"(\w+) is not installed \(pip install .*\)": lambda said: importlib.util.find_spec(said[1].lower()) is None,
    r"needs (bitsandbytes|torchao)": lambda said: importlib.util.find_spec(said[1]) is None,
    r"needs liger-kernel": lambda _: importlib.util.find_spec("liger_kernel") is None,
    r"two ranks need two cores": lambda _: len(os.sched_getaffinity(0)) < 2,
    r"needs Python 3.11": lambda _: importlib.util.find_spec("tomllib") is None,
    r"needs a transformers that can": _is_true_of_the_kernel,
    r"needs (the right to make a memory cgroup|a cgroup v1 freezer).*": _is_true_of_the_kernel,
    r"cannot (mount|make a file system|slow a device down) .*here.*": _is_true_of_the_kernel,
    r"this machine allows no (time|mount) namespaces.*": _is_true_of_the_kernel,
    r"this machine has no such level: .*|ladder: The protection that .* does not work here .*": _is_true_of_the_kernel,
    r"another user cannot run Python here": _is_true_of_the_kernel,
    r"libaio is missing, .*": lambda _: find_library("aio") is None,
    r"needs libaio": lambda _: find_library("aio") is None,
    r"this needs network namespaces, and .*": _is_true_of_the_kernel,
    r"this kernel's ramfs has O_DIRECT|no O_DIRECT here: .*|the kernel tells of no cgroup": _is_true_of_the_kernel,
    r"it learns no text|transformers (has no default for it|cannot build its default) .*": lambda _: True,
    r"on this machine recomputing the layers was faster.*": _is_true_of_the_kernel,
}
"""By what a reason says: whether this machine really lacks that."""


def is_expected(reason: str) -> bool:
    """Whether the reason is known, and true here."""
    found = ((re.fullmatch(pattern, reason, re.DOTALL), holds) for pattern, holds in _EXPECTED.items())
    return any(said is not None and holds(said) for said, holds in found)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a test was skipped for a reason that does not hold here."""
    if any(not is_expected(reason) for reason in _reasons(session.config)) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were skipped for each reason."""
    for reason, count in sorted(_reasons(terminalreporter.config).items()):
        known = "" if is_expected(reason) else "UNEXPECTED, so this run fails: "
        terminalreporter.write_line(f"skipped {count}: {known}{reason}")


def _reasons(config: pytest.Config) -> Counter[str]:
    """Of the tests that were skipped in all processes of this run; none in a process that another one asks."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return Counter()
    skipped = [each.longrepr for each in reporter.stats.get("skipped", [])]
    return Counter(reason[2].removeprefix("Skipped: ") for reason in skipped if isinstance(reason, tuple))
