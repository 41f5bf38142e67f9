"""One real tune under all that must not matter at once: odd paths, a jumping clock, secrets, another's leftovers."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
from helpers import TINY_CONFIG, processes_with

from ladder.tuning.sweep import run_marker

_MARKER = "LADDER_TEST_MARKER"
SECRETS = {
    name: f"planted-{secrets.token_hex(12)}"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "my_password")
}


@dataclass(frozen=True)
class HardTune:
    """What is left of it, and what was seen of its processes."""

    folder: Path
    run: Path
    output: Path
    drive: Path
    status: int
    said: str
    """All of stdout and stderr."""
    num_processes: int
    """Processes looked at, but for the controller itself."""
    leaks: frozenset[str]
    """Where a secret was seen among them: the file in /proc and the process."""
    num_left: int


def _temporary(prefix: str) -> Path:
    """Not under pytest's own folder, whose names cannot be chosen; gone with this process."""
    folder = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def newline_folder() -> Path:
    """A folder whose name has all that shells, JSON, YAML and terminals care for."""
    return _temporary(prefix='it\'s "a" tüne\nwith $(touch pwned) [bold] & more ')


@cache
def hard_tune() -> HardTune:
    """Run it, once for all tests that look at it."""
    folder = newline_folder()
    model, run, drive = folder / 'mödel "x"\n\x1b[31mred', folder / "run [" / "] 'é'\n", folder / "nvme\ndrive"
    for made in (model, drive):
        made.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_CONFIG))
    output = folder / "best [/] config\n.json".replace("/", "∕")
    run.mkdir(mode=0o700, parents=True)  # of the same earlier tune
    for leftover in (f"{run_marker(run)}-0007", "ladder-0000000000000000-0001"):
        (drive / leftover).mkdir()
        (drive / leftover / "rank0.swp").write_bytes(bytes(4096))
    options = {
        "--gpus": "0",
        "--rung": "zero2",
        "--micro-batch": "1",
        "--global-batch-size": "2",
        "--seq-len": "32",
        "--gpu-memory": "1GiB",
        "--strategy": "exhaustive",
        "--run-dir": str(run),
        "--output": str(output),
        "--nvme-path": str(drive),
    }
    arguments = [word for option in options.items() for word in option]
    return _run([str(model), *arguments], folder, run, output, drive)


def _run(arguments: list[str], folder: Path, run: Path, output: Path, drive: Path) -> HardTune:
    marker = secrets.token_hex(8)
    environment = {**os.environ, **SECRETS, **jumping_clock(folder), _MARKER: marker}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ladder.cli.main", "tune", *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        own = psutil.Process(process.pid).cmdline()
        leaks, seen = set(), set()
        while process.poll() is None:
            for other in processes_with(_MARKER, marker):
                # A child that has not yet become its own program still is the controller, which was given the secrets.
                if _arguments(other) not in (own, []):
                    seen.add(other.pid)
                    leaks |= _leaks_of(other)
            time.sleep(0.1)
        left = processes_with(_MARKER, marker)
        for survivor in left:
            survivor.kill()
        log.seek(0)
        said = log.read()
    return HardTune(folder, run, output, drive, process.returncode, said, len(seen), frozenset(leaks), len(left))


def _leaks_of(process: psutil.Process) -> set[str]:
    found = set()
    for file in ("environ", "cmdline"):
        try:
            data = Path(f"/proc/{process.pid}/{file}").read_bytes()
        except OSError:
            continue
        if any(value.encode() in data for value in SECRETS.values()):
            found.add(f"{file} of {_arguments(process)}")
    return found


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def jumping_clock(folder: Path) -> dict[str, str]:
    """The environment under which the wall clock jumps; empty where there is no compiler to make it so."""
    if shutil.which("gcc") is None:
        return {}
    # Not in `folder`: the loader splits LD_PRELOAD at blanks.
    library = _temporary("clock-") / "jumping_clock.so"
    source = Path(__file__).with_name("jumping_clock.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}
