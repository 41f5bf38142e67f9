"""The Python API: typed results, light to import, and the same answers as the commands'. Trials are simulated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import ladder
from ladder.cli.views import QuietView
from ladder.errors import NothingFitsError, UsageError
from ladder.protocol import TrialSpec

PAPER: dict[str, Any] = {"launcher": "simulated", "machine": "a100-40", "quiet": True}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> ladder.Tuned:
    folder = tmp_path_factory.mktemp("api")
    return ladder.tune("llama-2-7b", rungs=["zero2"], run_dir=folder / "run", output=str(folder / "best.json"), **PAPER)


def test_importing_ladder_loads_nothing_heavy_and_shows_its_api() -> None:
    heavy = {"torch", "pandas", "optuna", "rich", "ladder.api"}
    code = f"import sys, ladder; print(sorted(set(sys.modules) & {heavy}), dir(ladder))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("[] ")
    for name in ("tune", "plan", "verify", "load_best_config"):
        assert repr(name) in done.stdout
    with pytest.raises(AttributeError, match="no_such_thing"):
        ladder.no_such_thing  # noqa: B018


def test_a_tune_returns_what_its_file_says(tuned: ladder.Tuned) -> None:
    (path, *_) = tuned.output.files
    document = ladder.load_best_config(path)
    assert tuned.deepspeed_config() == {key: value for key, value in document.items() if key != "ladder"}
    assert tuned.best.candidate.engine.rung.name == document["ladder"]["rung"] == "zero2"
    assert f"{tuned.best.tokens_per_second:,.0f} tokens/s" in repr(tuned)


def test_training_arguments_agree_with_the_configuration(tuned: ladder.Tuned) -> None:
    arguments = tuned.training_arguments()
    config = arguments["deepspeed"]
    assert config == tuned.deepspeed_config()
    assert arguments["per_device_train_batch_size"] == config["train_micro_batch_size_per_gpu"]
    assert arguments["gradient_accumulation_steps"] == config["gradient_accumulation_steps"]


def test_the_trials_are_a_frame_and_a_notebook_shows_them(tuned: ladder.Tuned) -> None:
    assert set(tuned.trials["rung"]) == {"zero2"}
    assert len(tuned.trials) == 3 * 5
    shown = tuned._repr_html_()
    assert shown.count("<tr") == 1 + tuned.trials["trial"].notna().sum()
    assert "<script" not in shown
    assert tuned.report.is_file()


def test_that_nothing_fits_is_a_result_and_only_its_best_is_an_error(tmp_path: Path) -> None:
    nothing = ladder.tune("llama-2-7b", gpu_memory="2GiB", run_dir=tmp_path, output=tmp_path / "best.json", **PAPER)
    assert "nothing proven" in repr(nothing)
    with pytest.raises(NothingFitsError, match=r"What would fit, by prediction: .*GPUs of \d+ GiB"):
        _ = nothing.best


@pytest.mark.parametrize(
    ("options", "words"),
    [({"gpu": 4}, "no option gpu"), ({"gpu_memory": "lots"}, "'lots' is not a size"), ({"rungs": ["zero9"]}, "zero9")],
)
def test_an_option_that_cannot_be_is_a_usage_error(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ladder.tune("llama-2-7b", **{**PAPER, **options})


def test_a_plan_is_the_command_s(capsys: pytest.CaptureFixture[str]) -> None:
    from ladder.cli.main import main

    planned = ladder.plan("llama-2-7b", gpus=4, gpu_memory="40GiB")
    assert main(["plan", "llama-2-7b", "--gpus", "4", "--gpu-memory", "40GiB", "--format", "json"]) == 0
    assert planned.facts == json.loads(capsys.readouterr().out)
    assert list(planned.rungs["rung"]) == [row["rung"] for row in planned.facts["rungs"]]
    with pytest.raises(UsageError, match="speed"):
        ladder.plan("llama-2-7b", speed=1)


def test_a_tune_runs_off_the_main_thread(tmp_path: Path) -> None:
    results: list[ladder.Tuned] = []

    def work() -> None:
        results.append(
            ladder.tune("llama-2-7b", rungs=["zero3"], run_dir=tmp_path, output=tmp_path / "b.json", **PAPER)
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert results[0].best.candidate.engine.rung.name == "zero3"


class Pressing(QuietView):
    """Watches a tune, and presses Ctrl-C when its second trial begins."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.trials: list[str] = []

    def trial_begins(self, spec: TrialSpec, reason: str) -> None:
        self.trials.append(spec.trial)
        if len(self.trials) == 2:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def pressed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pressing]:
    view = Pressing(request.param)
    monkeypatch.setattr("ladder.api.watching", lambda **_: nullcontext(view))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is told to ignore it
    yield view
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("pressed", [1, 2], indirect=True)
def test_ctrl_c_ends_a_tune_and_not_the_process_and_the_same_call_goes_on(
    pressed: Pressing, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"run_dir": tmp_path, "output": tmp_path / "best.json", **PAPER}
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped; what was measured is kept" if pressed.times == 1 else "^$"):
        ladder.tune("llama-2-7b", **options)
    assert signal.getsignal(signal.SIGINT) is before
    assert "ending the trial" in capfd.readouterr().err
    pressed.times = 0
    begun = len(pressed.trials)
    assert ladder.tune("llama-2-7b", **options).best.candidate.engine.rung.name
    assert pressed.trials[0] not in pressed.trials[begun:]


def test_a_simulated_result_says_so(tuned: ladder.Tuned) -> None:
    assert repr(tuned).endswith(", simulated on a100-40>")


def test_turned_knobs_are_in_the_report_and_the_table(tmp_path: Path) -> None:
    turned = ladder.tune("llama-2-7b", rungs=["zero3"], knobs=4, run_dir=tmp_path, output=tmp_path / "b.json", **PAPER)
    assert turned.trials["why"].str.contains("; with ").any()
    assert "; with " in turned.report.read_text()
