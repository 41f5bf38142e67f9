"""Tunes with random faults: whatever happens, nothing is lost, nothing left behind, nothing called what it is not.

    python benchmarks/soak.py [--simulated 200] [--real 30] [--seed 0]

Each tune is hit once, at a random moment: on the simulated launcher its controller gets SIGKILL; on real CPU trials the
controller gets SIGINT, SIGTERM or SIGKILL, or the trial server or one rank gets SIGKILL. Then the same command is
started until it ends by itself. The last line is `tunes=… lost=… leaked=… misclassified=…`:

- lost: records that were in the history after the fault and are not in it at the end, and tunes that found no answer;
- leaked: processes with the run's marker that live two seconds after their controller;
- misclassified: candidates whose outcome is not that of an undisturbed tune; after the kill of a rank, but for one
  `crash`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ladder.cli.main import main as command_line
from ladder.errors import UsageError
from ladder.events.outcome import Record
from ladder.events.protocol import RUN_MARKER
from ladder.launch.sweep import run_marker
from ladder.runs.stored_run import read_run
from ladder.search.space import measured

FAULTS = ("controller SIGINT", "controller SIGTERM", "controller SIGKILL", "server SIGKILL", "rank SIGKILL", "none")
MACHINES = ("a100-40", "a100-80", "h100-80", "h200", "l4", "l40s", "rtx-4090")
TINY = Path(__file__).parents[1] / "tests" / "data" / "tiny"


@dataclass
class Count:
    tunes: int = 0
    lost: int = 0
    leaked: int = 0
    misclassified: int = 0

    def line(self) -> str:
        return f"tunes={self.tunes} lost={self.lost} leaked={self.leaked} misclassified={self.misclassified}"


def outcomes(records: Sequence[Record]) -> dict[str, str]:
    return {key: record.outcome.kind for key, record in measured(records).items()}


def identities(records: Sequence[Record]) -> set[tuple[str, str, str]]:
    return {(record.candidate_key, record.purpose, record.outcome.kind) for record in records}


def simulated_tune(folder: Path, machine: str, gpus: int, killed_after: float | None = None) -> float:
    """One tune on paper in a process of its own, which gets SIGKILL after so many seconds; returns its seconds."""
    arguments = ["tune", "llama-3.2-1b", "--gpus", str(gpus), "--seq-len", "1024", "--global-batch-size", "32"]
    arguments += ["--launcher", "simulated", "--machine", machine, "--run-dir", str(folder / "run")]
    arguments += ["--output", str(folder / "best_config.json"), "--quiet"]
    folder.mkdir(exist_ok=True)
    began = time.monotonic()
    child = os.fork()  # what is imported here need not be imported a thousand times
    if child == 0:
        status = 1
        try:
            words = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(words, 1)
            os.dup2(words, 2)
            status = command_line(arguments)
        finally:
            os._exit(status)
    if killed_after is not None:
        time.sleep(killed_after)
        os.kill(child, signal.SIGKILL)  # it is ours until the line below
    os.waitpid(child, 0)
    return time.monotonic() - began


def soak_simulated(tunes: int, dice: random.Random, count: Count) -> None:
    for _ in range(tunes):
        machine, gpus = dice.choice(MACHINES), dice.choice((1, 2, 4))
        with tempfile.TemporaryDirectory() as name:
            clean, hit = Path(name) / "clean", Path(name) / "hit"
            seconds = simulated_tune(clean, machine, gpus)
            simulated_tune(hit, machine, gpus, killed_after=dice.uniform(0, seconds))
            before = records_of(hit / "run")
            simulated_tune(hit, machine, gpus)
            after = records_of(hit / "run")
            if not (truth := outcomes(records_of(clean / "run"))):
                raise RuntimeError(f"the undisturbed tune on {gpus} × {machine} measured nothing")
            found = [(folder / "best_config.json").exists() for folder in (clean, hit)]
        count.tunes += 1
        count.lost += len(identities(before) - identities(after)) + (found[0] != found[1])
        count.misclassified += sum(kind != truth.get(key, kind) for key, kind in outcomes(after).items())


def records_of(run_dir: Path) -> list[Record]:
    """What the history holds; nothing where the tune was killed before there was one."""
    try:
        return read_run(run_dir).records
    except UsageError:
        return []


def marked(marker_of: Path) -> list[psutil.Process]:
    """The processes of the run in `marker_of`, found by the marker in their environment."""
    if not marker_of.exists():  # killed before it made its folder, and so before any other process
        return []
    marker, found = run_marker(marker_of), []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_MARKER) == marker:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


class RealTune:
    """One tune on the CPU, started as a user starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        folder.mkdir()
        self._command = [sys.executable, "-m", "ladder.cli.main", "tune", str(TINY), "--gpus", "0"]
        self._command += ["--gpu-memory", "400MiB", "--seq-len", "256", "--global-batch-size", "256"]
        self._command += ["--micro-batch", "1", "--micro-batch", "128", "--rung", "zero2"]
        self._command += ["--strategy", "exhaustive", "--run-dir", str(self.run_dir)]
        self._command += ["--output", str(folder / "best_config.json")]

    def start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log)

    def leaked(self) -> int:
        """Processes of the run that live on, two seconds after their controller; they are killed then."""
        deadline = time.monotonic() + 2
        while (left := marked(self.run_dir)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in left:
            process.kill()
        return len(left)


def strike(fault: str, controller: subprocess.Popen[bytes], run_dir: Path) -> bool:
    """Inject `fault`; False if there was nothing to hit at that moment."""
    whom, _, name = fault.partition(" ")
    if whom == "controller":
        controller.send_signal(getattr(signal, name))
        return True
    servers = [process for process in marked(run_dir) if process.ppid() == controller.pid]
    victims = servers if whom == "server" else [rank for server in servers for rank in server.children()]
    if not victims:
        return False
    victims[0].kill()
    return True


def soak_real(tunes: int, dice: random.Random, count: Count) -> None:
    with tempfile.TemporaryDirectory() as name:
        clean = RealTune(Path(name) / "clean")
        began = time.monotonic()
        if clean.start().wait() != 0:
            raise RuntimeError(f"the undisturbed tune failed: {(clean.folder / 'log.txt').read_text()[-2000:]}")
        seconds, truth = time.monotonic() - began, outcomes(records_of(clean.run_dir))
        print(f"undisturbed: {seconds:.0f} s, {truth}", flush=True)
        for number in range(tunes):
            fault = FAULTS[number % len(FAULTS)]
            one_tune(RealTune(Path(name) / f"tune {number}"), fault, dice.uniform(0.05, 1.0) * seconds, truth, count)
            print(f"{number + 1:3} {fault:20} {count.line()}", flush=True)


def one_tune(tune: RealTune, fault: str, delay: float, truth: dict[str, str], count: Count) -> None:
    controller = tune.start()
    struck = False
    if fault != "none":
        deadline = time.monotonic() + delay
        while controller.poll() is None and not struck:
            time.sleep(0.02)
            struck = time.monotonic() > deadline and strike(fault, controller, tune.run_dir)
    controller.wait()
    count.leaked += tune.leaked()
    before = identities(records_of(tune.run_dir))
    status = controller.returncode
    for _ in range(3):
        if status == 0:
            break
        status = tune.start().wait()
        count.leaked += tune.leaked()
    after = records_of(tune.run_dir)
    count.tunes += 1
    count.lost += len(before - identities(after)) + (status != 0)
    wrong = [kind for key, kind in outcomes(after).items() if kind != truth.get(key, kind)]
    allowed = 1 if fault == "rank SIGKILL" and struck and wrong[:1] == ["crash"] else 0
    count.misclassified += max(0, len(wrong) - allowed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", type=int, default=200)
    parser.add_argument("--real", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # A shell's background job ignores Ctrl-C, and so would the tunes that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dice = random.Random(options.seed)
    count = Count()
    soak_simulated(options.simulated, dice, count)
    print(f"simulated: {count.line()}", flush=True)
    soak_real(options.real, dice, count)
    print(count.line())
    return 0 if count.lost == count.leaked == count.misclassified == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
