"""What a process inherits from whoever starts it must not matter: closed descriptors, signals, unwritable folders."""

from __future__ import annotations

import json
import os
import py_compile
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Bench, tiny_trial
from helpers.programs import program, python

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.errors import EnvironmentFaultError
from ladder.launch.modules import module_command
from ladder.launch.operator_builds import build_operators
from ladder.tuning.operators import Operators
from ladder.tuning.tune_events import ignore

COMMAND = [sys.executable, "-m", "ladder.cli.main"]
TUNE = ["tune", "llama-2-7b", "--launcher", "simulated", "--machine", "a100-40", "--rung", "zero3"]
TEARDOWN_SECONDS = 15.0  # a server that sees no rank end is given up after thirty


def ladder(*arguments: str, closed: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line with descriptors closed as a shell closes them: `closed` is `>&-` or the like."""
    return program("bash", "-c", f'exec "$@" {closed}', "bash", *COMMAND, *arguments, folder=folder, status=None)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_tune_s_answer_is_written_whichever_descriptors_are_closed(closed: str, tmp_path: Path) -> None:
    done = ladder(*TUNE, closed=closed, folder=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert ("zero3" in done.stdout) == (" >&-" not in f" {closed}")
    assert json.loads((tmp_path / "best_config.json").read_bytes())


def test_what_is_for_a_closed_stderr_is_not_printed_among_the_answer(tmp_path: Path) -> None:
    done = ladder("tune", "llama-2-7b", "--rung", "zero9", "--format", "json", closed="2>&-", folder=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["exit_code"] == 2


def test_children_are_waited_for_where_their_ends_were_ignored(trial_environment: dict[str, str]) -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
        "from ladder.cli import main as cli; from ladder.launch.operator_builds import build_operators;"
        "cli.app = lambda **_: int(build_operators(['shm_comm'], {}) != {'shm_comm': None});"
        "sys.exit(cli.main())"
    )
    assert "Traceback" not in python(code, environment=trial_environment).stderr


def test_the_command_lets_the_ends_of_its_children_through_where_they_were_blocked() -> None:
    python(
        "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD});"
        "from ladder.cli import main as cli;"
        "cli.app = lambda **_: len(signal.pthread_sigmask(signal.SIG_BLOCK, ()));"
        "sys.exit(cli.main())"
    )


def test_a_trial_server_sees_its_ranks_end_where_that_signal_was_blocked(
    local_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    bench = local_bench()
    try:
        assert bench.run(tiny_trial(tmp_path / "0001", 1)).stop is None  # starts the server
        begin = time.monotonic()
        assert bench.run(tiny_trial(tmp_path / "0002", 1)).stop is None
        assert time.monotonic() - begin < TEARDOWN_SECONDS
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        bench.launcher.close()


def test_a_module_is_run_with_its_arguments_and_with_no_current_folder_among_its_paths(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text("import json, sys; print(json.dumps([__name__, sys.argv, sys.path]))")
    done = program(*module_command("shows", "--a", "b c"), environment={"PYTHONPATH": str(tmp_path)})
    name, arguments, path = json.loads(done.stdout)
    assert (name, arguments) == ("__main__", [str(tmp_path / "shows.py"), "--a", "b c"])
    assert str(tmp_path) in path
    assert "" not in path


def test_where_no_operator_can_be_kept_no_compiler_is_asked_for(
    trial_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/proc/none")
    operators = Operators(["shm_comm"], "adamw", trial_environment, lambda _: None, ignore, lambda: False)
    with pytest.raises(EnvironmentFaultError, match="set TORCH_EXTENSIONS_DIR to a folder that you can write to"):
        operators.need(RUNGS_BY_NAME["zero0"])


def test_where_no_temporary_file_can_be_made_the_sentence_names_tmpdir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    with pytest.raises(EnvironmentFaultError, match=r"^A temporary file cannot be created \(.*\); set TMPDIR to "):
        build_operators(["shm_comm"], {})


@pytest.mark.parametrize(("is_compiled", "is_kept"), [(False, True), (True, False)])
def test_compiled_python_is_kept_in_the_cache_where_torch_has_none(
    is_compiled: bool, is_kept: bool, tmp_path: Path
) -> None:
    package = tmp_path / "site" / "torch" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    if is_compiled:
        py_compile.compile(str(package))
    shows = "import json; from ladder.launch.modules import module_environment as ours; print(json.dumps(ours({})))"
    found = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": found, "PYTHONDONTWRITEBYTECODE": "1", "LADDER_CACHE": str(tmp_path / "cache")}
    environment = json.loads(python(shows, environment=own).stdout)
    assert environment.get("PYTHONPYCACHEPREFIX") == (str(tmp_path / "cache" / "bytecode") if is_kept else None)
    assert ("PYTHONDONTWRITEBYTECODE" in environment) != is_kept
