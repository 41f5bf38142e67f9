"""The Python API: typed results, light to import, and the same answers as the commands'. Trials are simulated."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from arguments import stubs
from helpers import there
from helpers.tunes import on_paper
from helpers.values import PAPER

import ladder
from ladder.cli.main import main
from ladder.errors import NothingFitsError, UsageError
from ladder.options.answer import VerifyOptions
from ladder.options.declaring import checked_values, declared
from ladder.options.plan import PlanOptions, ScaleOptions
from ladder.options.python_calls import in_python_words
from ladder.options.tune import TuneOptions
from ladder.tuning.run import run_tune
from ladder.tuning.tune_events import TrialBegins, TrialEnds, TuneEvent


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> ladder.Tuned:
    folder = tmp_path_factory.mktemp("api")
    return on_paper(
        folder, "llama-2-7b", rungs=["zero2"], machine="a100-40", gpus=None, output=str(folder / "best.json")
    )


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
    assert repr(tuned).endswith(", simulated on a100-40>")
    arguments = tuned.training_arguments()
    assert arguments["deepspeed"] == tuned.deepspeed_config()
    assert arguments["per_device_train_batch_size"] == document["train_micro_batch_size_per_gpu"]


def test_the_trials_are_a_frame_and_a_notebook_shows_them_and_the_report_with_its_charts(tuned: ladder.Tuned) -> None:
    assert set(tuned.trials["rung"]) == {"zero2"}
    assert len(tuned.trials) == 3 * 5
    shown = tuned._repr_html_()
    assert shown.count("<tr") == 1 + tuned.trials["trial"].notna().sum()
    assert "<script" not in shown
    assert tuned.report.is_file()
    assert 'title="report.html"' in shown


def test_that_nothing_fits_is_a_result_and_only_its_best_is_an_error(tmp_path: Path) -> None:
    nothing = on_paper(tmp_path, "llama-2-7b", gpu_memory="2GiB")
    assert "nothing proven" in repr(nothing)
    with pytest.raises(NothingFitsError, match=r"What would fit, by prediction: .*GPUs of \d+ GiB"):
        _ = nothing.best


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": 4}, r"tune\(\) has no option gpu; did you mean gpus\?"),
        ({"gpu_memory": "lots"}, "'lots' is not a size"),
        ({"rungs": "zero9"}, 'rungs="zero9" is unknown'),
        ({"strategy": "nope"}, "strategy: 'nope' is unknown; choose from auto, "),
        ({"time_budget": "300"}, "time_budget: '300' is not a duration; write it like 15m"),
        ({"seq_len": "2048"}, "seq_len: '2048' is not valid; give a whole number of at least 2"),
        ({"gpus": True}, "gpus: True is not valid"),
        ({"micro_batches": [4, 0]}, "micro_batches: 0 is not valid"),
        ({"tolerance": -1}, "tolerance: -1 is not valid; give a number from 0 to 0.5"),
        ({"knobs": 1000}, "knobs: 1000 is not valid; give a whole number from 0 to 200"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: nan is not valid"),
        ({"gradient_clipping": 10**400}, "gradient_clipping: 1000"),
        ({"output": None}, "output: None is not valid; give a path"),
        ({"liger": "yes"}, "liger: 'yes' is not valid; give True or False"),
        ({"machine": 40}, "machine: 40 is not valid; give a text"),
        ({"strategy": "walk", "tolerance": 0.1}, 'tolerance=… has no effect with strategy="walk"'),
    ],
)
def test_an_option_that_cannot_be_is_a_usage_error(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ladder.tune("llama-2-7b", **(PAPER | options))


def test_every_option_of_a_tune_is_checked_at_the_latest_when_the_tune_begins() -> None:
    for name in declared(TuneOptions):
        with pytest.raises(UsageError):
            checked_values(TuneOptions, {name: object()})
    with pytest.raises(UsageError, match="--gradient-clipping: inf is not valid"):
        run_tune(TuneOptions(model="llama-2-7b", gradient_clipping=float("inf")))


def test_one_thing_stands_for_a_sequence_of_one_and_a_text_for_a_path_a_size_or_a_duration() -> None:
    texts = {"rungs": "zero2", "output": "best.json", "host_memory": "1GiB", "time_budget": "15m"}
    values = {"rungs": ("zero2",), "output": Path("best.json"), "host_memory": 1 << 30, "time_budget": 900.0}
    given, meant = {"micro_batches": 4, "model": Path("a")}, {"micro_batches": (4,), "model": "a"}
    assert checked_values(TuneOptions, {**texts, **given}) == {**values, **meant}


def test_a_plan_is_the_command_s(capsys: pytest.CaptureFixture[str]) -> None:
    planned = ladder.plan("llama-2-7b", gpus=4, gpu_memory="40GiB")
    assert main(["plan", "llama-2-7b", "--gpus", "4", "--gpu-memory", "40GiB", "--format", "json"]) == 0
    assert planned.facts == json.loads(capsys.readouterr().out)
    assert list(planned.rungs["rung"]) == [row["rung"] for row in planned.facts["rungs"]]
    assert repr(planned).startswith("<Planned: llama-2-7b on 4 GPUs of 40 GiB; expected winner ")
    nothing = ladder.plan("llama-2-13b", gpus=1, gpu_memory="2GiB")
    assert repr(nothing) == "<Planned: llama-2-13b on 1 GPU of 2 GiB; nothing is predicted to fit>"


def test_a_tune_runs_off_the_main_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        tuned = threads.submit(on_paper, tmp_path, "llama-2-7b", rungs="zero3", micro_batches=1)
    assert tuned.result().best.candidate.engine.rung.name == "zero3"


class Pressing:
    """Watches a tune, and presses Ctrl-C when its second trial begins."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.trials: list[str] = []

    def __call__(self, event: TuneEvent) -> None:
        if not isinstance(event, TrialBegins):
            return
        self.trials.append(event.spec.trial)
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
    options: dict[str, Any] = {"rungs": ["zero1", "zero2", "zero3"], "gpus": 4}
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped; what was measured is kept" if pressed.times == 1 else "^$"):
        on_paper(tmp_path, "llama-2-7b", **options)
    assert signal.getsignal(signal.SIGINT) is before
    assert "ending the trial" in capfd.readouterr().err
    pressed.times = 0
    begun = len(pressed.trials)
    assert on_paper(tmp_path, "llama-2-7b", **options).best.candidate.engine.rung.name
    assert pressed.trials[0] not in pressed.trials[begun:]


def test_a_signature_names_every_option_with_its_type_and_default() -> None:
    calls: dict[Any, type] = {ladder.tune: TuneOptions, ladder.plan: PlanOptions, ladder.scale: ScaleOptions}
    for function, options in {**calls, ladder.verify: VerifyOptions}.items():
        parameters = inspect.signature(function).parameters
        assert all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        assert parameters.keys() >= declared(options).keys()
    signature = inspect.signature(ladder.tune)
    assert signature.parameters["strategy"].default == "auto"
    assert "gpu_memory: int | str | None = None" in str(signature)


def test_the_stubs_for_editors_are_as_the_options_are_declared() -> None:
    """`python scripts/arguments.py` writes them."""
    root = Path(__file__).parents[2]
    for path, text in stubs().items():
        assert (root / path).read_text() == text


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("--time-budget has no effect.", "time_budget=… has no effect."),
        ("--gpus 0 asks for ranks; leave out --gpus.", "gpus=0 asks for ranks; leave out gpus=…."),
        ("add --launcher simulated, or leave it out", 'add launcher="simulated", or leave it out'),
        ("--gpu-memory 40.00 GiB is more than it has", 'gpu_memory="40.00GiB" is more than it has'),
        ("--documented leaves it out; --no-liger too", "documented=True leaves it out; liger=False too"),
        ("start `ladder tune a --gpus 2` (--wait)", "start `ladder tune a --gpus 2` (wait=True)"),
        ("--no-such-option stays", "--no-such-option stays"),
    ],
)
def test_errors_name_options_as_python_callers_write_them(sentence: str, words: str) -> None:
    assert in_python_words(sentence, TuneOptions) == words


def test_notes_name_options_as_python_callers_write_them_and_those_of_the_command_as_they_are_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[TuneEvent] = []
    on_paper(tmp_path, "llama-3.2-1b", gpus=3, rungs="zero3", callbacks=[told.append])
    notes = [event.text for event in told if isinstance(event, ladder.Note)]
    assert any(note.endswith("over 3 ranks (global_batch_size=…).") for note in notes)
    assert not any("--" in note for note in notes)
    ladder.plan("llama-3.2-1b", gpus=3, gpu_memory="40GiB")
    assert "over 3 ranks (global_batch_size=…)." in capsys.readouterr().err
    assert main(["plan", "llama-3.2-1b", "--gpus", "3", "--gpu-memory", "40GiB"]) == 0
    assert "over 3 ranks (--global-batch-size)." in capsys.readouterr().err


def test_a_run_that_is_loaded_has_the_result_of_its_tune(tuned: ladder.Tuned, tmp_path: Path) -> None:
    loaded = ladder.load_run(tuned.output.run_dir)
    assert not loaded.running
    assert repr(loaded) == repr(tuned)
    assert loaded.trials.equals(tuned.trials)
    assert loaded.best.measurement == tuned.best.measurement
    assert loaded.deepspeed_config() == tuned.deepspeed_config()
    assert loaded.training_arguments() == tuned.training_arguments()
    assert loaded.report == tuned.report
    with pytest.raises(ladder.UsageError, match="is not a run folder"):
        ladder.load_run(tmp_path)


def test_an_answer_without_deepspeed_is_loaded_as_its_tune_told_it_and_has_no_configuration_of_deepspeed(
    tmp_path: Path,
) -> None:
    tuned = on_paper(tmp_path, "llama-3.2-1b", gpus=2, backend="torch")
    loaded = ladder.load_run(tuned.output.run_dir)
    assert (tuned.output.answer, loaded.output.answer) == (None, None)
    assert repr(loaded) == repr(tuned) != ""
    assert there(loaded.plain).candidate == tuned.best.candidate == loaded.best.candidate
    assert "deepspeed" not in loaded.training_arguments()
    assert loaded.training_arguments() == tuned.training_arguments()
    with pytest.raises(UsageError, match="trains without DeepSpeed"):
        loaded.deepspeed_config()


def test_a_run_can_be_loaded_while_its_tune_goes_on(tmp_path: Path) -> None:
    seen: list[bool] = []

    def look(event: TuneEvent) -> None:
        if isinstance(event, TrialEnds) and not seen:
            loaded = ladder.load_run(tmp_path / "run")
            assert loaded.trials["trial"].notna().any()
            with pytest.raises(UsageError, match="is still running"):
                _ = loaded.best
            seen.append(loaded.running)

    on_paper(tmp_path, "llama-2-7b", rungs="zero3", callbacks=[look])
    assert seen == [True]


def test_every_column_of_a_frame_is_explained(tuned: ladder.Tuned, tmp_path: Path) -> None:
    def explained(attribute: Any) -> list[str]:
        return re.findall(r"^ *- (\w+)", attribute.__doc__, re.MULTILINE)

    assert explained(ladder.Tuned.trials) == list(tuned.trials.columns)
    assert explained(ladder.Planned.rungs) == list(ladder.plan("opt-125m", gpus=1, gpu_memory="8GiB").rungs.columns)
    compared = ladder.scale("opt-125m", gpus="1", gpu_memory="8GiB")
    assert explained(ladder.Scaled.points) == list(compared.points.columns)
