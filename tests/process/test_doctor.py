"""`ladder doctor`: every problem has its status and its fix, and what it prints gives nothing away."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ladder.cli.main import main
from ladder.doctor import hardware, hub, software
from ladder.doctor.builds import fix_of_build
from ladder.doctor.check import Check, guarded
from ladder.errors import UsageError
from ladder.workload.source import resolve_model


def only(checks: Iterator[Check]) -> Check:
    (check,) = checks
    return check


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--format", "json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_on_a_sound_machine_nothing_fails_and_every_warning_has_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_neverShownAnywhere")
    monkeypatch.setenv("HOME", "/home/somebody")
    status, document = as_json(capsys, "--model", "tiny-llama")
    assert (status, document["failed"]) == (0, [])
    names = {check["name"] for check in document["checks"]}
    assert {"torch", "deepspeed", "compiler", "host memory", "/dev/shm", "libaio", "Hub token", "model"} <= names
    for check in document["checks"]:
        assert bool(check["fix"]) == (check["status"] not in ("OK", "OPEN")), check
    assert "hf_neverShown" not in json.dumps(document)
    assert "/home/somebody" not in json.dumps(document)


def test_what_fails_ends_the_command_with_its_own_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.1")  # or libaio fails, too
    assert main(["doctor", "--nvme-path", str(tmp_path / "missing"), "--model", "no-such-model"]) == 4
    printed = capsys.readouterr()
    assert "checks failed: NVMe folder, model" in printed.err
    assert printed.out.count("FAIL") == 2


def test_a_secret_in_a_sentence_does_not_reach_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "verysecretvalue")
    monkeypatch.setenv("CXX", "verysecretvalue")
    _, document = as_json(capsys)
    assert "verysecretvalue" not in json.dumps(document)
    assert "(secret)" in json.dumps(document)


def test_a_package_outside_its_range_fails_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.version
    old = {"transformers": "4.40.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: old.get(name) or found(name))
    bad = [check for check in software.packages() if check.status != "OK"]
    assert [check.name for check in bad] == ["transformers"]
    assert "4.40.0 is outside" in bad[0].sentence
    assert bad[0].fix.startswith("pip install 'transformers")


def test_from_a_source_tree_that_is_not_installed_versions_are_told_and_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    first, *others = software.packages()
    assert (first.status, first.name, first.fix) == ("WARN", "ladder", "pip install '.[train]'")
    assert {check.status for check in others} == {"OK"}


def test_without_a_compiler_the_warning_says_which_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = next(iter(software.compilers()))
    assert (check.status, check.name) == ("WARN", "compiler")
    assert "no-such-compiler" in check.sentence
    assert "apt-get install g++" in check.fix


@pytest.fixture(scope="module")
def about_torch() -> dict[str, Any]:
    """What the doctor hears of torch from a process that imports it."""
    return software.about_torch()


def test_a_cpu_build_of_torch_beside_a_driver_fails(
    about_torch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "about_torch", lambda: about_torch)
    check, *others = software.torch_and_driver((12, 8))
    if "CPU only" not in check.sentence:
        pytest.skip("this torch is built for CUDA")
    assert not others
    assert check.status == "FAIL"
    assert "pip install torch" in check.fix


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_cpu_that_multiplies_bf16_slowly_is_told_and_no_reason_to_worry(
    is_fast: bool, about_torch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    about = about_torch | {"cuda": None, "cpu_bf16": is_fast}
    monkeypatch.setattr(software, "about_torch", lambda: about)
    check = only(software.torch_and_driver(None))
    assert check.status == "OK"
    assert ("bf16 slowly" in check.sentence) is not is_fast


def test_torch_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = only(software.torch_and_driver(None))
    assert check.status == "FAIL"
    assert "libcudart.so.12" in check.sentence


def test_the_drive_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    from ladder.machine.nvme import check_nvme_path

    try:
        check_nvme_path(tmp_path)
    except UsageError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    folder = next(check for check in hardware.nvme(tmp_path) if check.name == "NVMe folder")
    assert folder.facts["write_bytes_per_second"] > 1e6
    assert folder.facts["read_bytes_per_second"] > 1e6
    assert list(tmp_path.iterdir()) == []


def test_a_look_that_breaks_down_ends_none_of_the_others() -> None:
    def broken() -> Iterator[Check]:
        raise ZeroDivisionError("in the depths")
        yield

    check = only(guarded("something", broken))
    assert check.status == "FAIL"
    assert "in the depths" in check.sentence


def test_a_gated_model_that_cannot_be_asked_for_but_is_bundled_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    check = only(hub.access("meta-llama/Llama-2-7b-hf"))
    assert check.status == "WARN"
    assert "6.74 billion" in check.sentence


@pytest.mark.timeout(1800)  # compiles async_io, if the gate's own build has not yet
def test_build_builds_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = as_json(capsys, "--build")
    built = {check["name"]: check["status"] for check in document["checks"] if check["name"].startswith("operator ")}
    assert set(built.values()) == {"OK"}
    assert "operator async_io" in built


def test_a_note_about_a_model_is_no_reason_to_ask_for_access(tmp_path: Path) -> None:
    config = {**resolve_model("tiny-llama").config, "architectures": ["LlamaForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check = only(hub.access(str(tmp_path)))
    assert check.status == "OK"
    assert "tuned as a language model" in check.sentence


def test_the_token_that_is_looked_for_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    assert "run `hf auth login`, or set HF_TOKEN" in only(hub.token()).sentence
    (tmp_path / "token").write_text("hf_stored")
    assert only(hub.token()).sentence == "is set"
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert only(hub.token()).sentence == "is set"


def test_a_model_that_cannot_be_read_comes_with_a_remedy_of_its_own(tmp_path: Path) -> None:
    check = only(hub.access(str(tmp_path)))
    assert (check.status, check.fix) == ("FAIL", "give the folder that has one")
    (tmp_path / "config.json").write_text("[]")
    assert only(hub.access(str(tmp_path))).fix == "give a model's config.json"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("its build was killed by signal 2", "something outside ladder killed it"),
        ("its build was killed by signal 9", "free some host memory"),
        ("its build was stopped before it finished", "may take 15 minutes"),
        ("[Errno 13] Permission denied: '/root'", "TORCH_EXTENSIONS_DIR"),
    ],
)
def test_a_build_that_was_ended_is_blamed_on_no_compiler(reason: str, words: str) -> None:
    fix = fix_of_build("shm_comm", reason)
    assert words in fix
    assert "g++" not in fix


def test_a_missing_compiler_is_named_and_headers_only_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "libaio-dev" in fix_of_build("async_io", "fatal error: libaio.h: No such file or directory")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "apt-get install g++" in fix_of_build("async_io", "no-such-compiler: not found")
