"""Ctrl-C, SIGTERM and a closed terminal end a tune in good order; the second time, at once. Nothing is left."""

from __future__ import annotations

import ctypes.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from faults.command import Command, started
from faults.steady_ladder import SPEEDS
from helpers import wait_until

MEASURED = re.compile(r"^  (zero\d) ckpt=on mb=1 +[\d,]+ tokens/s", re.MULTILINE)


def measured(command: Command) -> list[str]:
    """The rungs whose trial has ended: the strategy asks for one candidate of each."""
    return MEASURED.findall(command.errors())


def press_ctrl_c(command: Command) -> None:
    assert command.terminal is not None
    os.write(command.terminal, b"\x03")


def close_terminal(command: Command) -> None:
    assert command.terminal is not None
    os.close(command.terminal)
    command.terminal = None


def terminate(command: Command) -> None:
    command.process.terminate()


@pytest.mark.parametrize(
    ("interrupt", "status"),
    [(press_ctrl_c, 130), (terminate, 143), (close_terminal, 129)],
    ids=["Ctrl-C", "SIGTERM", "hang-up"],
)
def test_the_first_signal_keeps_and_prints_the_best_so_far_and_leaves_nothing(
    tmp_path: Path, interrupt: Callable[[Command], None], status: int
) -> None:
    with started(tmp_path, terminal=interrupt is not terminate) as command:
        wait_until(lambda: len(measured(command)) >= 1 and len(command.trials()) > len(measured(command)), 90)
        wait_until(lambda: len(command.marked()) >= 3, 30)
        interrupt(command)
        asked = time.monotonic()
        assert command.process.wait(timeout=30) == status
        assert time.monotonic() - asked < 15
        assert command.marked() == []
        best = max(measured(command), key=lambda rung: SPEEDS[rung])
        assert f"Best so far, not proven: {best} ckpt=on mb=1" in command.output()
        assert "Stopped: the tune was interrupted" in command.output()
        assert "Traceback" not in command.errors()


def test_ctrl_c_twice_ends_at_once(tmp_path: Path) -> None:
    with started(tmp_path, terminal=True) as command:
        wait_until(lambda: command.has_reached("engine") and len(command.marked()) >= 3, 90)
        press_ctrl_c(command)
        wait_until(lambda: "press again to end at once" in command.errors())
        press_ctrl_c(command)
        asked = time.monotonic()
        assert command.process.wait(timeout=30) == 130
        assert time.monotonic() - asked < 1
        assert command.output() == ""  # it did not even say goodbye
        wait_until(lambda: command.marked() == [], 3)


def test_ctrl_c_while_the_server_still_imports_does_not_wait_for_it(tmp_path: Path) -> None:
    with started(tmp_path, terminal=True) as command:
        wait_until(lambda: len(command.marked()) == 1, 60)
        press_ctrl_c(command)
        assert command.process.wait(timeout=15) == 130
        assert not command.has_reached("process_group")
        assert command.marked() == []
        assert "Traceback" not in command.errors()


OFFLOADED = ["tune", "./model", "--gpus", "0", "--seq-len", "64", "--global-batch-size", "4", "--gpu-memory", "1GiB"]
OFFLOADED += [
    "--micro-batch",
    "1",
    "--run-dir",
    "run",
    "--rung",
    "zero3+opt-nvme",
    "--nvme-path",
    ".",
    "--optimizer",
    "sgd",
]


def compiling(folder: Path, *, terminal: bool = False) -> AbstractContextManager[Command]:
    """A tune whose first trial needs operators that are not built yet. The test is skipped without libaio."""
    if ctypes.util.find_library("aio") is None:
        pytest.skip("libaio is missing, which an operator that is compiled for the first trial needs")
    environment = {"TORCH_EXTENSIONS_DIR": str(folder / "operators")}
    return started(folder, terminal=terminal, arguments=OFFLOADED, environment=environment)


def test_ctrl_c_while_operators_compile_ends_the_compilers(tmp_path: Path) -> None:
    with compiling(tmp_path, terminal=True) as command:
        wait_until(command.is_compiling, 60)
        press_ctrl_c(command)
        assert command.process.wait(timeout=15) == 130
        assert command.trials() == []
        wait_until(lambda: command.marked() == [], 3)
        assert "Traceback" not in command.errors()


def test_kill_9_while_operators_compile_ends_the_compilers_too(tmp_path: Path) -> None:
    with compiling(tmp_path) as command:
        wait_until(command.is_compiling, 60)
        command.process.kill()
        wait_until(lambda: command.marked() == [], 3)


def test_a_build_that_is_killed_takes_its_compilers_along_and_is_said_so(tmp_path: Path) -> None:
    with compiling(tmp_path) as command:
        wait_until(command.is_compiling, 60)
        next(process for process in command.marked() if "ladder.trial.operators" in process.cmdline()).kill()
        assert command.process.wait(timeout=15) == 2  # and the only rung is left out
        assert command.marked() == []
        assert "its build was killed by signal 9" in command.errors()


PROGRAM = """
import os, signal, sys
from ladder.tuning.interruption import interruptible
with interruptible() as interruption:
    os.kill(os.getpid(), signal.SIGHUP)
    sys.exit(interruption.exit_code if interruption() else 0)
"""


@pytest.mark.parametrize(("before", "status"), [(signal.SIG_IGN, 0), (signal.SIG_DFL, 129)])
def test_a_tune_under_nohup_outlives_its_terminal(before: signal.Handlers, status: int) -> None:
    program = f"import signal; signal.signal(signal.SIGHUP, signal.{before.name})\n{PROGRAM}"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == status
