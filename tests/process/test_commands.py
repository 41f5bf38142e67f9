"""Commands in a process of their own: what they load, and what they do where stdout takes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert "tune" in done.stdout


@pytest.mark.parametrize(
    ("act", "heavy"),
    [
        ("import ladder.emit", {"torch", "deepspeed", "transformers", "accelerate", "pydantic"}),
        (
            "from ladder.workload.source import resolve_model; resolve_model('tiny-llama')",
            {"huggingface_hub", "transformers", "torch"},
        ),
    ],
    ids=["emitting", "a bundled name"],
)
def test_what_needs_no_heavy_library_loads_none(act: str, heavy: set[str]) -> None:
    code = f"import sys; {act}; print('loaded:', *sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "loaded:\n"


def test_a_tune_loads_no_pandas_and_only_a_simulated_one_a_simulator(tmp_path: Path) -> None:
    code = (
        "import sys, ladder.tuning.run; assert 'ladder.simulation.launcher' not in sys.modules;"
        "from ladder.cli.main import main; status = main(sys.argv[1:]);"
        "assert 'ladder.simulation.launcher' in sys.modules and 'pandas' not in sys.modules; sys.exit(status)"
    )
    arguments = ["tune", "llama-2-7b", "--launcher", "simulated", "--machine", "a100-40", "--quiet"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(("call", "frozen"), [("main()", True), ("main(['schema'])", False)])
def test_only_a_command_that_ends_its_process_leaves_no_object_to_search_for_garbage(call: str, frozen: bool) -> None:
    code = f"import gc, sys; from ladder.cli.main import main; {call}; print(gc.get_freeze_count() > 0)"
    done = subprocess.run(
        [sys.executable, "-c", code, "schema"], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == str(frozen)


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
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*COMMAND, "tune", "--help"], check=False, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


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
    environment = {**os.environ, "_LADDER_COMPLETE": "complete_bash", "COMP_WORDS": f"ladder {typed}"}
    environment["COMP_CWORD"] = str(len(typed.split()))
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'ladder'; from ladder.cli.main import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert set(done.stdout.split()) == offered, done.stderr


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ladder", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Usage: " in done.stdout
    assert "__main__" not in done.stdout
