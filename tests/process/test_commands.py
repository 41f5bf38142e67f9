"""Commands in a process of their own: what they load, and what they do where stdout takes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.programs import program, python

HEAVY = {"torch", "deepspeed", "transformers", "accelerate", "optuna", "pandas", "plotly", "huggingface_hub", "pynvml"}
HEAVY |= {"yaml"}
COMMAND = [sys.executable, "-m", "ladder.cli.main"]


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["tune", "--help"], ["plan", "llama-2-7b", "--gpus", "4", "--gpu-memory", "40GiB"], ["schema"]],
    ids=" ".join,
)
def test_help_and_plan_are_printed_without_loading_anything_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from ladder.cli.main import main; status = main(sys.argv[1:]);"
        f"print('loaded:', *sorted({HEAVY!r} & set(sys.modules))); sys.exit(status)"
    )
    said = python(code, *arguments).stdout
    assert said.splitlines()[-1] == "loaded:"
    assert "tune" in said


def test_a_tune_loads_no_pandas_and_only_a_simulated_one_a_simulator(tmp_path: Path) -> None:
    code = (
        "import sys, ladder.tuning.run; assert 'ladder.simulation.launcher' not in sys.modules;"
        "from ladder.cli.main import main; status = main(sys.argv[1:]);"
        "assert 'ladder.simulation.launcher' in sys.modules and 'pandas' not in sys.modules; sys.exit(status)"
    )
    python(code, "tune", "llama-2-7b", "--launcher", "simulated", "--machine", "a100-40", "--quiet", folder=tmp_path)


@pytest.mark.parametrize(("call", "frozen"), [("main()", True), ("main(['schema'])", False)])
def test_only_a_command_that_ends_its_process_leaves_no_object_to_search_for_garbage(call: str, frozen: bool) -> None:
    code = f"import gc, sys; from ladder.cli.main import main; {call}; print(gc.get_freeze_count() > 0)"
    assert python(code, "schema").stdout.splitlines()[-1] == str(frozen)


def test_what_a_full_disk_does_not_take_is_said_in_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "schema"], check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 4
    assert done.stderr == "ladder: stdout cannot be written (No space left on device); free some space there.\n"


def test_a_reader_that_has_seen_enough_is_no_bug() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        arguments = [*COMMAND, "plan", "llama-2-7b", "--machine", "a100-40"]
        done = subprocess.run(arguments, check=False, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_locale_that_lacks_a_character_is_no_bug() -> None:
    assert program(*COMMAND, "tune", "--help", environment={"PYTHONIOENCODING": "ascii"}).stderr == ""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tune tiny", {"tiny-llama"}),
        ("plan tiny-llama --machine a100", {"a100-40", "a100-80"}),
        ("tune tiny-llama --rung zero3+opt", {"zero3+opt-cpu", "zero3+opt-nvme"}),
        ("explain --why zero3+opt", {"zero3+opt-cpu", "zero3+opt-nvme"}),
    ],
)
def test_a_shell_completes_models_machines_and_rungs(typed: str, offered: set[str]) -> None:
    environment = {"_LADDER_COMPLETE": "complete_bash", "COMP_WORDS": f"ladder {typed}"}
    environment["COMP_CWORD"] = str(len(typed.split()))
    code = "import sys; sys.argv[0] = 'ladder'; from ladder.cli.main import main; main()"
    assert set(python(code, environment=environment, status=None).stdout.split()) == offered


def test_it_runs_as_a_module() -> None:
    said = program(sys.executable, "-m", "ladder", "--help").stdout
    assert "Usage: " in said
    assert "__main__" not in said


PUBLISHES = """
from ladder.trial.script.running import publish_nothing
publish_nothing()
from huggingface_hub import HfApi, create_repo, upload_file
print(HfApi().create_repo("somebody/model", exist_ok=True).repo_id, create_repo("somebody/other").repo_id)
print(HfApi().upload_folder(repo_id="somebody/model", folder_path="."), upload_file(path_or_fileobj=b""))
"""


def test_a_script_that_makes_a_repository_and_uploads_goes_on_and_nothing_leaves_the_machine() -> None:
    """While it is looked at or tried."""
    assert python(PUBLISHES).stdout.splitlines()[-2:] == ["somebody/model somebody/other", "None None"]


def test_ctrl_c_while_the_command_is_still_imported_ends_it_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    code = (  # what starts the tests may have them ignore SIGINT
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from ladder.__main__ import start; start()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (-signal.SIGINT, b"")


@pytest.mark.parametrize(
    ("package", "command"),
    [("psutil", ["plan"]), ("optuna", ["sbatch", "opt-125m"]), ("numpy", ["sbatch", "opt-125m"])],
)
def test_a_package_that_ladder_needs_and_is_missing_is_named_in_one_sentence(
    package: str, command: list[str], tmp_path: Path
) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}', name={package!r})")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-m", "ladder", *command], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith(f"ladder: {package} is missing in {sys.prefix}, where ladder runs; ")
