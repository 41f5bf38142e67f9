"""`--log-to`: what a tracker is told, one that is missing or fails, and the real ones where they are installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ladder import api
from ladder.cli.main import main
from ladder.machine.lease import InterruptedWaitError
from ladder.tuning import trackers as tracking
from ladder.tuning.options import TuneOptions
from ladder.tuning.run import TuneOutput, run_tune
from ladder.tuning.tune_events import Note, Subscriber, TuneEvent, ignore

TUNE = ["tune", "llama-3.2-1b", "--launcher", "simulated", "--machine", "a100-40", "--gpus", "1"]


class Notebook:
    """A tracker on paper; `patience` is how many candidates it takes before it fails."""

    def __init__(self, patience: int = 1000) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.said: Mapping[str, Any] = {}
        self.patience = patience
        self.closed: tracking.HowItEnded | None = None

    def candidate(self, name: str, figures: Mapping[str, Any]) -> None:
        if len(self.rows) >= self.patience:
            raise ConnectionError("the server\nis gone")
        self.rows.append(figures)

    def answer(self, figures: Mapping[str, Any]) -> None:
        self.said = figures

    def close(self, ending: tracking.HowItEnded) -> None:
        self.closed = ending


def tune(tracker: Notebook, folder: Path, tell: Subscriber = ignore) -> TuneOutput:
    on_paper: dict[str, Any] = {"launcher": "simulated", "machine": "a100-40", "gpus": 1, "backend": "deepspeed"}
    files: dict[str, Any] = {"run_dir": folder / "run", "output": folder / "best_config.json"}
    tracked = tracking.Tracking(tracker, "notebook")
    return run_tune(TuneOptions(model="llama-3.2-1b", **on_paper, **files), tracked.beside(tell))


def test_a_tracker_is_told_the_figures_of_trials_csv_and_the_answer_and_again_when_the_tune_goes_on(
    tmp_path: Path,
) -> None:
    notebook, again = Notebook(), Notebook()
    done = tune(notebook, tmp_path)
    table = pd.read_csv(tmp_path / "run" / "trials.csv").dropna(subset="trial").set_index("rung")
    measured = [row for row in notebook.rows if row["purpose"] == "measure"]
    assert len(measured) >= len(table) >= 3
    for row in measured:
        same = table.loc[[row["rung"]]]
        same = same[(same["micro_batch"] == row["micro_batch"]) & (same["checkpointing"] == row["checkpointing"])]
        assert (same["outcome"] == row["outcome"]).all()
    assert done.answer is not None
    assert notebook.said["answer"] == done.answer.candidate.key
    assert notebook.said["answer_tokens_per_second"] == done.answer.tokens_per_second
    assert notebook.said["simulated"] is True
    assert None not in notebook.said.values()
    tune(again, tmp_path)
    assert [row["candidate"] for row in again.rows] == [row["candidate"] for row in notebook.rows]


def test_a_tracker_that_fails_is_left_alone_and_the_tune_goes_on(tmp_path: Path) -> None:
    notebook, told = Notebook(patience=2), list[TuneEvent]()
    assert tune(notebook, tmp_path, told.append).answer is not None
    assert len(notebook.rows) == 2
    warnings = [event.text for event in told if isinstance(event, Note) and event.text.startswith("Warning")]
    assert warnings == [r"Warning: logging to notebook failed and stops: the server\nis gone"]


@pytest.mark.parametrize("through", ["command", "function"])
def test_an_interrupted_tune_logs_no_answer_and_is_closed_as_interrupted(
    through: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    class Interrupting(Notebook):
        def candidate(self, name: str, figures: Mapping[str, Any]) -> None:
            super().candidate(name, figures)
            if len(self.rows) == 1:
                os.kill(os.getpid(), signal.SIGINT)

    notebook = Interrupting()
    monkeypatch.setattr(tracking, "_open", lambda name, asked: notebook)
    if through == "command":
        assert main([*TUNE, "--quiet", "--log-to", "mlflow"]) == 130
    else:
        with pytest.raises(KeyboardInterrupt):
            api.tune("llama-3.2-1b", launcher="simulated", machine="a100-40", gpus=1, quiet=True, log_to="mlflow")
    assert (len(notebook.rows) > 0, notebook.said, notebook.closed) == (True, {}, "interrupted")


@pytest.mark.parametrize(
    ("error", "ending"),
    [(None, "succeeded"), (RuntimeError, "failed"), (InterruptedWaitError, "interrupted")],
)
def test_a_trackers_run_is_closed_as_the_tune_ended(
    error: type[BaseException] | None, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = Notebook()
    monkeypatch.setattr(tracking, "_open", lambda name, asked: notebook)
    with suppress(RuntimeError, InterruptedWaitError), tracking.tracking("mlflow", TuneOptions(model="tiny-llama")):
        if error is not None:
            raise error("no GPU came free")
    assert notebook.closed == ending


@pytest.mark.parametrize(
    ("name", "packages"), [("trackio", "trackio"), ("wandb", "wandb"), ("mlflow", "mlflow-skinny sqlparse")]
)
def test_a_missing_package_is_said_before_any_trial_with_what_to_install(
    name: str, packages: str, monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert main([*TUNE, "--log-to", name]) == 2
    error = capsys.readouterr().err
    assert f"`pip install {packages}`" in error
    assert error.count("\n") == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["trackio", "wandb", "mlflow"])
def test_the_real_tracker_takes_a_tune_offline_and_stdout_stays_one_document(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ladder.cli.main", *TUNE, "--rung", "zero0"),
            *("--quiet", "--format", "json", "--log-to", name),
        ],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answer"]["engine"] == "zero0"
    assert "failed and stops" not in done.stderr
    left = {"trackio": "trackio/*.db", "wandb": "wandb/offline-run-*/*.wandb", "mlflow": "mlflow.db"}[name]
    assert len(list(tmp_path.glob(left))) == 1
