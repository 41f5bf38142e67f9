"""Paths with blanks, quotes, line breaks, brackets, dollars and letters of other languages are ordinary paths."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml
from faults.hard_tune import HardTune, hard_tune
from helpers import Bench, tiny_trial

from ladder.cli.main import main
from ladder.emit import load_best_config

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def tuned() -> HardTune:
    return hard_tune()


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


def test_the_launch_script_is_one_that_a_shell_reads(tuned: HardTune) -> None:
    script = tuned.output.with_name(tuned.output.stem + ".launch.sh")
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)
    done = subprocess.run(
        ["bash", str(script)], check=False, capture_output=True, text=True, timeout=20, cwd=tuned.folder
    )
    assert done.returncode == 2
    assert "usage" in done.stderr
    assert not (tuned.folder / "pwned").exists()


def test_swap_files_of_an_earlier_tune_of_this_run_folder_are_gone_and_others_are_there(tuned: HardTune) -> None:
    assert [path.name for path in tuned.drive.iterdir()] == ["ladder-0000000000000000-0001"]


def test_names_from_outside_do_not_break_a_line_of_the_messages(tuned: HardTune) -> None:
    introduction = next(line for line in tuned.said.splitlines() if "illion parameters" in line)
    assert re.search(r"\\n\\x1b\[31mred", introduction)
    assert "\x1b[31m" not in tuned.said


def test_bytes_that_are_no_text_are_refused_in_a_sentence(tmp_path: Path) -> None:
    code = "import sys; from ladder.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable.encode(), b"-c", code.encode(), b"tune", b"tiny-llama", b"--gpus", b"0"]
    done = subprocess.run(
        [*command, b"--run-dir", b"run\xff"], check=False, capture_output=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 2
    assert b"run\\udcff is not valid UTF-8" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--run-dir", "--output", "--nvme-path"])
def test_a_sentence_about_an_odd_path_stays_one_line(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["tune", "tiny-llama", "--gpus", "0", option, "file/a\n\x1b[31mb"]) in (2, 4)
    errors = capsys.readouterr().err
    assert errors.splitlines()[-1].startswith("ladder: ")
    assert "\x1b" not in errors


# Ports


def test_two_trials_at_once_do_not_meet_on_a_port_even_with_the_usual_one_taken(
    local_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody else has taken it: as well
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        benches = [local_bench(), local_bench()]
        try:
            runs, both_ready = {}, threading.Barrier(2)

            def run_trial(index: int) -> None:
                benches[index].run(tiny_trial(tmp_path / f"first{index}", 1))  # waits for its server's imports
                both_ready.wait(timeout=120)
                runs[index] = benches[index].run(tiny_trial(tmp_path / f"{index}", 1))

            threads = [threading.Thread(target=run_trial, args=(index,)) for index in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for bench in benches:
                bench.launcher.close()
    overlap = min(run.ended for run in runs.values()) - max(run.started for run in runs.values())
    assert overlap > 0, "the trials did not run at the same time"
    for run in runs.values():
        assert run.exits == {0: 0, 1: 0}
        assert all(events[-1].kind == "done" for events in run.events)
