"""No secret is passed on or written down, no code of a model repository runs, and every name is data."""

from __future__ import annotations

import ast
import json
import os
import re
import secrets
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import TINY_CONFIG

import ladder
from ladder.cli.main import main
from ladder.doctor.software import torch_and_driver
from ladder.errors import UsageError
from ladder.launch.operator_builds import build_operators
from ladder.launch.protecting import WORDS
from ladder.launch.secrets import blanked_secrets
from ladder.launch.trial_server import TrialServer
from ladder.simulation.paper_machine import read_machine
from ladder.tuning.prepared import slug
from ladder.workload.config_guard import OWN_CODE_NOTE

pytestmark = pytest.mark.timeout(300)
PACKAGE = Path(ladder.__file__).parent
ROOT = PACKAGE.parent


# Secrets


def test_secrets_are_known_by_their_names_and_settings_are_not_taken_for_any() -> None:
    hidden = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_APIKEY", "AWS_SECRET_ACCESS_KEY"]
    hidden += ["GITHUB_TOKEN", "db_password", "GOOGLE_APPLICATION_CREDENTIALS", "SSH_PRIVATE_KEY", "TOKEN"]
    hidden += ["PGPASSWORD", "SSHPASS", "CLIENT_SECRETS", "OPENAI_KEY", "GITHUB_PAT"]
    kept = ["TOKENIZERS_PARALLELISM", "PATH", "CUDA_HOME", "NCCL_DEBUG", "KEYBOARD", "COMPASS", "NUM_PATHS", "HF_HOME"]
    kept += ["SECRETARY", "LD_PRELOAD"]
    assert blanked_secrets(hidden + kept) == dict.fromkeys(hidden, "")


# Code from model repositories

OWN_CODE = {
    "auto_map": {"AutoModelForCausalLM": "modeling.Evil", "AutoConfig": "modeling.EvilConfig"},
    "trust_remote_code": True,
}


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """The folder `model` with a model whose code and weights would leave the file `pwned`."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    (model / "modeling.py").write_text(f"import pathlib; pathlib.Path({str(folder / 'pwned')!r}).touch()")
    (model / "pytorch_model.bin").write_bytes(b"cbuiltins\nexec\n(Vraise SystemExit\ntR.")


def test_a_model_that_names_code_of_others_is_refused_before_transformers_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path, TINY_CONFIG | {"attn_implementation": {"": "sdpa", "text_config": "someone/kernel@main:run"}})
    already = "transformers" in sys.modules
    assert main(["tune", "./model", "--gpus", "0"]) == 5
    assert ("transformers" in sys.modules) == already
    assert "refused: its " in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("change", [OWN_CODE, {"inner_config": OWN_CODE}], ids=["top", "nested"])
@pytest.mark.parametrize("family", ["llama", "olmo2"])  # which ladder counts itself, and which transformers does
def test_code_that_a_model_brings_runs_neither_here_nor_where_transformers_counts_the_model(
    family: str,
    change: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path, TINY_CONFIG | {"model_type": family} | change)
    assert main(["plan", "./model", "--machine", "h100-80"]) == 0
    said = capsys.readouterr().err
    assert OWN_CODE_NOTE in said
    assert "estimate" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


HOSTILE_FILES = ["psutil.py", "torch.py", "types.py"]


@pytest.fixture
def hostile_folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is a model's, with files that have the names of modules that all our programs import.

    An empty entry in PYTHONPATH stands for it.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", getattr(request, "param", os.pathsep) + os.environ.get("PYTHONPATH", ""))
    for name in HOSTILE_FILES:
        (tmp_path / name).write_text(f"import os; os.mkdir({str(tmp_path / 'pwned')!r})")
    return tmp_path


@pytest.mark.parametrize("hostile_folder", ["", os.pathsep], ids=["no PYTHONPATH", "an empty entry"], indirect=True)
def test_a_trial_server_runs_no_file_of_the_current_folder(
    hostile_folder: Path,
    trial_environment: dict[str, str],
    trial_job: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    log = tmp_path_factory.mktemp("server") / "server.log"
    marker = f"ladder-test-{secrets.token_hex(8)}"
    server = TrialServer(marker=marker, job=trial_job, environment=trial_environment, log=log)
    try:
        assert server.wait_ready()
    finally:
        server.close()
    assert sorted(os.listdir(hostile_folder)) == HOSTILE_FILES


def test_a_build_of_an_operator_runs_no_file_of_the_current_folder(
    hostile_folder: Path, trial_environment: dict[str, str]
) -> None:
    assert build_operators(["shm_comm"], trial_environment) == {"shm_comm": None}
    assert sorted(os.listdir(hostile_folder)) == HOSTILE_FILES


def test_the_doctor_runs_no_file_of_the_current_folder(hostile_folder: Path) -> None:
    assert [check.name for check in torch_and_driver(None)] == ["torch and CUDA"]
    assert sorted(os.listdir(hostile_folder)) == HOSTILE_FILES


# Names are data


@pytest.mark.parametrize("name", ["--flag", "a\nb", "; touch pwned"])  # each is looked at by a process of its own
def test_a_script_with_such_a_name_is_no_option_and_no_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "--gpus", "0", "--", name]) == 2
    _is_one_sentence(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def _is_one_sentence(errors: str) -> None:
    *notes, last = errors.splitlines()
    assert last.startswith("ladder: ")
    assert all(note.startswith("Looking at ") or note in WORDS.values() for note in notes)


@pytest.mark.parametrize("name", ["--flag", "../../x", "/etc/passwd", "..", ".", "a/../..", "x\ny", "$(reboot)", "ü"])
def test_a_run_folder_named_after_a_model_stays_under_the_runs(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", slug(name))


# The source


def test_no_code_of_ours_uses_a_shell_an_unsafe_loader_or_weights() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            found += [f"{path.name}:{node.lineno}: {why}" for why in dangers(node)]  # type: ignore[attr-defined]
    assert found == []


SAFELY = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
"""How weights are loaded: from this host, from files that hold numbers alone, without code from beside them."""


def dangers(node: ast.AST) -> list[str]:
    """Why a line of source must not be: what it loads could be code, or what it runs could be data."""
    if isinstance(node, ast.Import) and any(alias.name.split(".")[0] in ("pickle", "marshal") for alias in node.names):
        return ["pickle"]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id == "yaml" and node.attr not in ("safe_load", "safe_dump", "YAMLError"):
            return [f"yaml.{node.attr}"]
        if (node.value.id, node.attr) in (("os", "system"), ("os", "popen"), ("torch", "load")):
            return [f"{node.value.id}.{node.attr}"]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained":
        given = {each.arg: each.value.value for each in node.keywords if isinstance(each.value, ast.Constant)}
        return [] if given.items() >= SAFELY.items() else ["from_pretrained"]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
        return [node.func.id]
    if isinstance(node, ast.keyword) and node.arg in ("shell", "trust_remote_code"):
        off = isinstance(node.value, ast.Constant) and node.value.value is False
        return [] if off else [node.arg]
    return []


@pytest.mark.parametrize(
    "line",
    [
        *(f"{name}(x)" for name in ("yaml.load", "os.system", "A.from_pretrained", "eval")),
        *(f"f({switch}={on})" for switch in ("shell", "trust_remote_code") for on in (True, "x")),
    ],
)
def test_such_a_line_would_be_found(line: str) -> None:
    assert [why for node in ast.walk(ast.parse(line)) for why in dangers(node)]


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the checkout")
def test_the_floors_that_security_md_explains_are_the_ones_that_are_required() -> None:
    required = (ROOT / "pyproject.toml").read_text("utf-8")
    explained = (ROOT / "SECURITY.md").read_text("utf-8")
    for package in ("torch", "transformers"):
        floor = re.search(rf'"{package}>=([\d.]+)', required)
        assert floor is not None
        assert f"`{package}>={floor.group(1)}`" in explained


def test_an_unreadable_yaml_is_a_sentence_and_runs_nothing(tmp_path: Path) -> None:
    evil = tmp_path / "machine.yaml"
    evil.write_text(
        f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{tmp_path}/pwned']]"
    )
    with pytest.raises(UsageError):
        read_machine(str(evil))
    assert not (tmp_path / "pwned").exists()
