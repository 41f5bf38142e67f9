"""However the trial server ends, its ranks end with it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest
from helpers import TINY_CONFIG, WORLD_SIZE, processes_with, tiny_trial, wait_until

from ladder.errors import EnvironmentFaultError, ModelNotAccessibleError
from ladder.events.as_json import from_json, to_json
from ladder.events.protocol import RUN_MARKER, TrialSpec
from ladder.events.step_policy import StepPolicy
from ladder.launch.base import Deadlines
from ladder.launch.local import LocalLauncher
from ladder.launch.trial_server import TrialServer, kill_marked
from ladder.machine.gpus import visible_gpus

ENDLESS = StepPolicy(minimum=100_000, maximum=100_000)


Servers = Callable[..., AbstractContextManager[TrialServer]]


@pytest.fixture
def servers(tmp_path: Path, trial_job: dict[str, Any], trial_environment: dict[str, str]) -> Servers:
    """Starts a server that finds modules in `tmp_path` first, with changes to its job; it may leave no process."""
    found_first = os.pathsep.join(filter(None, [str(tmp_path), trial_environment.get("PYTHONPATH")]))

    @contextmanager
    def started(environment: Mapping[str, str] = MappingProxyType({}), **job: Any) -> Iterator[TrialServer]:
        marker = f"ladder-test-{secrets.token_hex(8)}"
        told = {**trial_environment, "PYTHONPATH": found_first, **environment}
        server = TrialServer(marker=marker, job=trial_job | job, environment=told, log=tmp_path / "server.log")
        with closing(server):
            yield server
        assert processes_with(RUN_MARKER, marker) == []

    return started


def test_a_server_loads_more_operators_on_request_and_ends_with_its_ranks_when_its_stdin_does(
    servers: Servers, tmp_path: Path
) -> None:
    """Its model's configuration is longer than an argument may be."""
    labels = {str(index): "a label of some length" for index in range(20_000)}
    with servers(model_config=TINY_CONFIG | {"id2label": labels}, operators=[]) as server:
        assert server.wait_ready()

        def is_loaded() -> bool:
            return any("shm_comm" in module.path for module in psutil.Process(server.pid).memory_maps())

        assert not is_loaded()
        assert server.load(["shm_comm"])
        assert is_loaded()

        (tmp_path / "0001").mkdir()
        spec = tmp_path / "0001" / "spec.json"
        spec.write_text(to_json(tiny_trial(spec.parent, 1, steps=ENDLESS)))
        server.start("0001", spec)
        wait_until(lambda: b'"step"' in b"".join(path.read_bytes() for path in spec.parent.glob("rank*.jsonl")))
        assert len(processes_with(RUN_MARKER, server.marker)) >= 1 + WORLD_SIZE
        assert server._process.stdin is not None
        server._process.stdin.close()
        wait_until(lambda: not processes_with(RUN_MARKER, server.marker), seconds=5)
        assert server._process.wait(timeout=5) == 0


def test_a_server_that_is_asked_for_an_operator_that_does_not_load_names_it(servers: Servers) -> None:
    with servers(operators=[]) as server:
        assert server.wait_ready()
        with pytest.raises(EnvironmentFaultError, match="no-such-operator"):
            server.load(["no-such-operator"])


@pytest.mark.parametrize(
    ("job", "kind", "said"),
    [
        (
            {"model_config": {"model_type": "no-such-model"}},
            ModelNotAccessibleError,
            r"does not know this model .*no-such-model",
        ),
        ({"operators": ["no-such-operator"]}, EnvironmentFaultError, "no-such-operator"),
    ],
    ids=["model", "operator"],
)
def test_a_server_that_cannot_load_what_it_needs_says_why(
    servers: Servers, job: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with servers(**job) as server:
        with pytest.raises(kind, match=said) as error:
            server.wait_ready()
        assert len(str(error.value)) < 400
        assert processes_with(RUN_MARKER, server.marker) == []


def test_only_processes_with_the_marker_are_killed() -> None:
    marker = f"ladder-test-{secrets.token_hex(8)}"
    environments = {"ours": marker, "another run's": marker + "0", "nobody's": ""}
    sleepers = {
        whose: subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_MARKER: value})
        for whose, value in environments.items()
    }
    try:
        assert kill_marked(marker) == 1
        assert [whose for whose, process in sleepers.items() if process.poll() is not None] == ["ours"]
    finally:
        for process in sleepers.values():
            process.kill()
            process.wait()


_ENDS = {
    "preload_if_there": "import os\nopen(__file__ + '.imported', 'w')\nos._exit(1)\n",
    "preload": "import os\nname = __file__ + '.imported'\nif not os.path.exists(name):\n"
    "    open(name, 'w')\n    os._exit(1)\n",
}


@pytest.mark.parametrize("preloaded", _ENDS)
def test_a_server_that_ends_while_it_starts_is_started_again_without_what_it_may_leave_out(
    preloaded: str, tmp_path: Path, trial_job: dict[str, Any], trial_environment: dict[str, str]
) -> None:
    """One that ends once stands for one that is killed."""
    (tmp_path / "ends.py").write_text(_ENDS[preloaded])
    found_first = os.pathsep.join(filter(None, [str(tmp_path), trial_environment.get("PYTHONPATH")]))
    launcher = LocalLauncher(
        marker=f"ladder-test-{secrets.token_hex(8)}",
        job=trial_job | {preloaded: ["ends"]},
        environment=trial_environment | {"PYTHONPATH": found_first},
        log=tmp_path / "server.log",
    )
    with closing(launcher):
        run = launcher.run(tiny_trial(tmp_path / "trial", 1), Deadlines(), lambda *_: None)
    assert (tmp_path / "ends.py.imported").exists()
    assert run.stop is None
    assert run.exits == {0: 0, 1: 0}


def test_a_server_of_a_tune_that_ends_before_it_is_ready_ends_with_it(servers: Servers, tmp_path: Path) -> None:
    with servers() as server:
        assert server._process.stdin is not None
        server._process.stdin.close()
        assert server._process.wait(timeout=60) in (0, 1)
    assert "Traceback" not in (tmp_path / "server.log").read_text()


def test_what_touches_the_gpu_when_imported_is_no_part_of_a_server(servers: Servers, tmp_path: Path) -> None:
    packages = ("bitsandbytes", "torchao")
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    finds = f"import importlib.util\nassert not any(map(importlib.util.find_spec, {packages!r}))\n"
    (tmp_path / "eager.py").write_text(finds)
    with servers(preload=["eager"]) as server:
        assert server.wait_ready()
    assert not (tmp_path / "imported").exists()


def test_who_touches_the_gpu_while_a_server_imports_is_named(servers: Servers, tmp_path: Path) -> None:
    asks = "import torch\nfrom contextlib import suppress\nwith suppress(Exception):\n    torch.cuda.current_device()\n"
    (tmp_path / "curious.py").write_text(asks)
    with servers({"DS_ACCELERATOR": "cuda"}, preload=["curious"], operators=[]) as server:
        # Where there is no GPU, the fork that tries to use it cannot either.
        with pytest.raises(EnvironmentFaultError, match=r"/curious\.py:4 initialises CUDA, so forked ranks cannot"):
            server.wait_ready()
        assert processes_with(RUN_MARKER, server.marker) == []


@pytest.mark.skipif(not visible_gpus(), reason="needs a CUDA GPU")
def test_a_package_that_initialises_cuda_without_torch_is_noticed(servers: Servers, tmp_path: Path) -> None:
    (tmp_path / "curious.py").write_text("import ctypes\nctypes.CDLL('libcuda.so.1').cuInit(0)\n")
    with servers({"DS_ACCELERATOR": "cuda"}, preload=["curious"], operators=[]) as server:
        with pytest.raises(EnvironmentFaultError, match="forked process: a package has initialised it without torch"):
            server.wait_ready()
        assert processes_with(RUN_MARKER, server.marker) == []


WRITE = """
import sys
from dataclasses import replace
from pathlib import Path
from helpers import TINY_CONFIG, tiny_trial
from ladder.launch.base import Deadlines
from ladder.launch.local import LocalLauncher
folder = Path(sys.argv[1])
spec = replace(tiny_trial(folder / "0001", 1), model_config_json=TINY_CONFIG | {"label": "\\u00e9"})
launcher = LocalLauncher(marker=sys.argv[2], job={}, environment={}, log=folder / "log", cancelled=lambda: True)
launcher.run(spec, Deadlines(), lambda rank, event: None)
"""


def test_what_a_server_is_told_of_a_trial_does_not_depend_on_the_locale(tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", WRITE, str(tmp_path), f"ladder-test-{os.getpid()}"],
        check=True,
        env={**os.environ, **ascii_only, "PYTHONPATH": path},
        timeout=60,
    )
    told = from_json(TrialSpec, (tmp_path / "0001" / "spec.json").read_bytes())
    assert told.model_config_json["label"] == "é"
