"""One real tune under all that must not matter at once: odd paths, a jumping clock, secrets, another's leftovers.

Paths with blanks, quotes, line breaks, brackets, dollars and letters of other languages are ordinary paths; no deadline
and no measured time depends on a wall clock that jumps by a day; no secret is passed on or written down.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import pytest
import yaml
from helpers import TINY_CONFIG, processes_with

from ladder.emit import load_best_config
from ladder.launch.sweep import run_marker

_MARKER = "LADDER_TEST_MARKER"
SECRETS = {
    name: f"planted-{secrets.token_hex(12)}"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "my_password")
}


pytestmark = pytest.mark.timeout(300)
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to make the clock jump")
DAY = 86400.0


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


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> HardTune:
    folder = tmp_path_factory.mktemp("hard") / 'it\'s "a" tüne\nwith $(touch pwned) [bold] & more'
    folder.mkdir()
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
    clock = jumping_clock(tmp_path_factory.mktemp("clock"))
    return _run([str(model), *arguments], clock, folder, run, output, drive)


def _run(arguments: list[str], clock: dict[str, str], folder: Path, run: Path, output: Path, drive: Path) -> HardTune:
    marker = secrets.token_hex(8)
    environment = {**os.environ, **SECRETS, **clock, _MARKER: marker}
    own = [sys.executable, "-m", "ladder.cli.main", "tune", *arguments]  # a new process may not have it in /proc yet
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            own,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        leaks, seen = set(), set()
        while process.poll() is None:
            for other in processes_with(_MARKER, marker):
                # A child that has not yet become its own program still is the controller, which was given the secrets.
                if _arguments(other) not in (own, []):
                    seen.add(other.pid)
                    if found := _leaks_of(other):
                        time.sleep(0.2)  # it may be about to become its own program
                        leaks |= found & _leaks_of(other)
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
    library = folder / "jumping_clock.so"  # the loader splits LD_PRELOAD at blanks
    source = Path(__file__).with_name("jumping_clock.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}


# The clock


@needs_gcc
def test_a_tune_under_a_jumping_clock_finds_its_answer_with_sane_times(tuned: HardTune) -> None:
    assert tuned.status == 0, tuned.said
    stamps = [
        datetime.datetime.fromisoformat(line["datetime_complete"])
        for line in map(json.loads, (tuned.run / "journal.log").read_text().splitlines())
        if line.get("datetime_complete")
    ]
    assert stamps
    real = datetime.datetime.now(datetime.timezone.utc)
    assert all(abs((stamp - real).total_seconds()) > DAY / 2 for stamp in stamps), "the clock of the tune did not jump"
    assert 0 < load_best_config(tuned.output)["ladder"]["step_seconds"] < 60
    for trial in (tuned.run / "trials").iterdir():
        times = [json.loads(line)["t"] for line in (trial / "rank0.jsonl").read_text().splitlines()]
        assert 0 < max(times) - min(times) < 300


# Paths


def test_a_tune_among_such_paths_finds_its_answer_and_leaves_no_process(tuned: HardTune) -> None:
    assert tuned.status == 0, tuned.said
    assert "Traceback" not in tuned.said
    assert tuned.num_processes >= 4  # a build, the server and two ranks at the least
    assert tuned.num_left == 0
    for path in (tuned.run, tuned.output, tuned.drive):
        assert "\n" in str(path)
        assert '"' in str(path)


def test_everything_is_where_it_was_asked_for_and_nowhere_else(tuned: HardTune) -> None:
    companions = {tuned.output.with_name(tuned.output.stem + end) for end in (".trainer.json", ".accelerate.yaml")}
    companions |= {tuned.output, tuned.output.with_name(tuned.output.stem + ".launch.sh")}
    others = {path for path in tuned.folder.iterdir() if path.is_file()}
    assert others == companions
    assert list(Path.cwd().glob("pwned*")) == list(tuned.folder.rglob("pwned")) == []
    assert {path.name for path in tuned.run.iterdir()} >= {"journal.log", "trials", "trials.csv", "server.log"}


def test_what_was_written_is_read_back_with_the_paths_in_it(tuned: HardTune) -> None:
    config = load_best_config(tuned.output)
    assert Path(config["ladder"]["run_dir"]) == tuned.run
    accelerate = yaml.safe_load(tuned.output.with_name(tuned.output.stem + ".accelerate.yaml").read_text())
    assert Path(accelerate["deepspeed_config"]["deepspeed_config_file"]) == tuned.output
    trainer = json.loads(tuned.output.with_name(tuned.output.stem + ".trainer.json").read_text())
    assert Path(trainer["deepspeed"]) == tuned.output
    assert set(pd.read_csv(tuned.run / "trials.csv")["outcome"]) <= {"answer", "fits"}


def test_swap_files_of_an_earlier_tune_of_this_run_folder_are_gone_and_others_are_there(tuned: HardTune) -> None:
    assert [path.name for path in tuned.drive.iterdir()] == ["ladder-0000000000000000-0001"]


def test_names_from_outside_do_not_break_a_line_of_the_messages(tuned: HardTune) -> None:
    introduction = next(line for line in tuned.said.splitlines() if "illion parameters" in line)
    assert re.search(r"\\n\\x1b\[31mred", introduction)
    assert "\x1b[31m" not in tuned.said


# Secrets


def test_no_process_of_a_tune_has_a_secret_in_its_environment_or_arguments(tuned: HardTune) -> None:
    assert tuned.status == 0, tuned.said
    assert tuned.num_processes >= 4
    assert tuned.leaks == frozenset()


def test_no_file_and_no_line_of_output_has_a_secret(tuned: HardTune) -> None:
    files = [path for path in tuned.folder.rglob("*") if path.is_file()]
    assert len(files) > 15
    for value in SECRETS.values():
        assert value not in tuned.said
        assert [path for path in files if value.encode() in path.read_bytes()] == []
