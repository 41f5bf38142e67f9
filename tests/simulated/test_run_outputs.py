"""What `--output` may name: links, FIFOs, our own stdout, and files that a tune must not cost the user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import TINY_CONFIG

from ladder.cli.defaults import FILE as DEFAULTS
from ladder.cli.main import main
from ladder.simulation.paper_machine import machine_files

COMPANIONS = ("best_config.trainer.json", "best_config.accelerate.yaml", "best_config.launch.sh")


@pytest.fixture(name="folder")
def started_from(folder: Path) -> Path:
    """Where the command is started: a model, a machine on paper and defaults lie there."""
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    (folder / "machine.accelerate.yaml").write_text(machine_files()["a100-40"].read_text())
    DEFAULTS.write_text("tune: {launcher: simulated, rung: [zero2], quiet: true}\n")
    return folder


def tune(output: str | Path, model: str = ".", machine: str = "a100-40") -> int:
    workload = ["--gpus", "2", "--seq-len", "64", "--global-batch-size", "8"]
    return main(["tune", model, *workload, "--machine", machine, "--output", str(output)])


def files_in(folder: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


def refused(capsys: pytest.CaptureFixture[str], output: str | Path, *arguments: str) -> str:
    """The one sentence with which a tune is refused as a wrong request, before any trial and with no file changed."""
    before = files_in(Path())
    assert tune(output, *arguments) == 2
    assert files_in(Path()) == before
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"ladder: --output {output}")
    return sentence


# Links


def test_a_link_stays_and_the_answer_is_written_where_it_leads(folder: Path) -> None:
    (folder / "kept").mkdir()
    for name in ("best_config.json", *COMPANIONS):
        (folder / name).symlink_to(Path("kept") / name)  # which is not there yet
    for _ in range(2):
        assert tune("best_config.json") == 0
        for name in ("best_config.json", *COMPANIONS):
            assert (folder / name).is_symlink()
            assert (folder / "kept" / name).stat().st_size
    assert len(files_in(folder / "kept")) == 4
    assert os.access(folder / "kept" / "best_config.launch.sh", os.X_OK)


def test_a_link_that_leads_nowhere_is_one_sentence_before_any_trial(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, target in {"into.json": "missing/x.json", "one.json": "other.json", "other.json": "one.json"}.items():
        (folder / name).symlink_to(target)
    for name in ("into.json", "one.json"):
        assert tune(name) == 4
        assert capsys.readouterr().err.startswith(f"ladder: --output {name} cannot be written")
        assert (folder / name).is_symlink()
    assert not (folder / "ladder-runs").exists()


# What cannot be replaced


def read_from(fifo: Path, command: list[str]) -> str:
    """What comes out of a new FIFO while `command` runs, which has to leave it in its place."""
    os.mkfifo(fifo)
    descriptor = os.open(fifo, os.O_RDWR)  # the command finds a reader, and no end that waits for a writer
    seen: list[bytes] = []
    try:
        reader = threading.Thread(target=lambda: seen.append(os.read(descriptor, 1 << 20)), daemon=True)
        reader.start()
        assert main(command) == 0
        assert fifo.is_fifo()
        reader.join(10)
    finally:
        os.close(descriptor)
    return seen[0].decode()


@pytest.mark.parametrize("command", ["export", "report"])
def test_a_fifo_takes_the_text_and_stays(
    command: str, simulated_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {
        "export": ["export", str(simulated_run.parent / "best_config.json"), "--for", "torchrun"],
        "report": ["report", str(simulated_run), "--format", "markdown"],
    }[command]
    assert main(asked) == 0
    plain = capsys.readouterr().out
    assert read_from(tmp_path / "fifo", [*asked, "--output", str(tmp_path / "fifo")]) == plain


def test_what_is_in_the_file_that_stdout_goes_to_stays(simulated_run: Path, tmp_path: Path) -> None:
    """As `--output /dev/stdout >> log` asks, by a link of our own: a failure would replace the machine's."""
    stdout, log = tmp_path / "stdout", tmp_path / "log"
    stdout.symlink_to("/proc/self/fd/1")
    log.write_text("what a job said before\n")
    export = ["export", str(simulated_run.parent / "best_config.json"), "--for", "torchrun", "--output", str(stdout)]
    with log.open("a") as stream:
        subprocess.run([sys.executable, "-m", "ladder.cli.main", *export], stdout=stream, check=True)
    lines = log.read_text().splitlines()
    assert lines[:2] == ["what a job said before", "#!/usr/bin/env bash"]
    assert lines[-1] == f"Wrote {stdout}"
    assert stdout.is_symlink()


# What must not be lost


READS = "which ladder reads"
FOREIGN = "was not written by ladder"


@pytest.mark.parametrize(
    ("output", "model", "machine", "words"),
    [
        ("config.json", ".", "a100-40", f"config.json, {READS}"),
        ("link.json", "config.json", "a100-40", f"config.json, {READS}"),
        ("mine.json", "mine.trainer.json", "a100-40", f"mine.trainer.json, {READS}"),
        ("machine.json", ".", "machine.accelerate.yaml", f"machine.accelerate.yaml, {READS}"),
        ("machine.accelerate.yaml", ".", "machine.accelerate.yaml", f"machine.accelerate.yaml, {READS}"),
        (str(DEFAULTS), ".", "a100-40", f"{DEFAULTS}, {READS}"),
        *((f"foreign{number}.json", ".", "a100-40", FOREIGN) for number in range(6)),
        *((f"pipe{number}.json", ".", "a100-40", "is not a regular file") for number in range(4)),
    ],
)
def test_neither_the_answer_nor_a_companion_replaces_what_the_tune_is_started_from_or_what_ladder_did_not_write(
    output: str, model: str, machine: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "link.json").symlink_to("config.json")
    (folder / "mine.trainer.json").write_text(json.dumps(TINY_CONFIG))
    foreign = b'{"train_batch_size": 8}', b"learning_rate: 1", b"[" * 5000, b"[1]", b"\xff", b'{"ladder": 1}'
    for number, content in enumerate(foreign):
        (folder / f"foreign{number}.json").write_bytes(content)
    for number, end in enumerate(("json", "trainer.json", "accelerate.yaml", "launch.sh")):
        os.mkfifo(folder / f"pipe{number}.{end}")
    assert words in refused(capsys, output, model, machine)


def test_no_answer_is_written_where_defaults_would_be_read_from(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DEFAULTS.unlink()
    arguments = ["--launcher", "simulated", "--machine", "a100-40", "--quiet", "--output", str(DEFAULTS)]
    assert main(["tune", "tiny-llama", *arguments]) == 2
    assert "which ladder reads" in capsys.readouterr().err
    assert not DEFAULTS.exists()


def test_an_earlier_answer_is_replaced_and_what_this_tune_did_not_write_so_is_kept_beside(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is kept of an empty file, nor of files that the same tune wrote and nobody edited."""
    answer, launch = folder / "best_config.json", folder / "best_config.launch.sh"
    answer.touch()
    for _ in range(2):
        assert tune(answer.name) == 0
    assert list(folder.glob("*.old*")) == []
    written = answer.read_text()
    for edit in ("# mine\n", "# mine again\n"):
        edited = launch.read_text() + edit
        launch.write_text(edited)
        assert tune(answer.name) == 0
        assert launch.read_text() != edited
    assert answer.read_text() == written
    assert [path.read_text().splitlines()[-1] for path in sorted(folder.glob("*.old*"))] == ["# mine", "# mine again"]
    assert os.access(folder / "best_config.launch.sh.old", os.X_OK)
    capsys.readouterr()
    assert tune(answer.name, "opt-125m") == 0
    assert (folder / "best_config.json.old").read_text() == written
    assert answer.read_text() != written
    assert f", or was edited, as {folder / 'best_config.json.old'}, " in capsys.readouterr().out
