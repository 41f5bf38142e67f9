"""Paths with blanks, quotes, line breaks, brackets, dollars and letters of other languages are ordinary paths."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Bench, tiny_trial

from ladder.cli.main import main

pytestmark = pytest.mark.timeout(300)


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
