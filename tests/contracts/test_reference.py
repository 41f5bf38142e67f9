"""The reference pages say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference


@pytest.fixture(scope="module")
def document() -> dict[str, object]:
    return reference.simulated_answer()


def test_no_page_is_stale(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_page_is_named_and_then_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    monkeypatch.setattr(reference, "DOCS", docs)
    page = docs / "reference" / "outcomes.md"
    page.parent.mkdir(parents=True)
    page.write_text(f"# Old\n\n{reference.HAND}\n\nKept.\n")
    assert reference.main(["--check"]) == 1
    assert "docs/reference/outcomes.md is stale" in capsys.readouterr().err
    assert page.read_text().startswith("# Old")
    assert reference.main([]) == 0
    assert "| `gpu_oom` |" in page.read_text()
    assert page.read_text().endswith(f"{reference.HAND}\n\nKept.\n")
    assert reference.main(["--check"]) == 0


def test_a_key_without_a_description_is_refused(document: dict[str, object]) -> None:
    section = document["ladder"]
    assert isinstance(section, dict)
    with pytest.raises(reference.StaleError, match=r"a description.*surprise"):
        reference.best_config_schema({"ladder": {**section, "surprise": 1}})
    workload = {key: value for key, value in section["workload"].items() if key != "task"}
    with pytest.raises(reference.StaleError, match=r"do not exist: workload\.task"):
        reference.best_config_schema({"ladder": {**section, "workload": workload}})
    with pytest.raises(reference.StaleError, match="micro_batch of"):
        reference.best_config_schema({"ladder": {**section, "micro_batch": "4"}})
