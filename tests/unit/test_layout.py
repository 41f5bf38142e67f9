"""Rules of the repository that no other tool holds: imports in tests/, what mutations break, what CI installs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutate import MOST_ALIVE, misplaced, read_table
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{'.' * node.level}{node.module or ''}"


@pytest.mark.parametrize("folder", ["unit", "simulated", "contracts", "process", "faults", "gpu", "helpers"])
def test_no_test_is_imported_and_what_tests_share_lies_in_helpers(folder: str) -> None:
    files = list((TESTS / folder).rglob("*.py"))
    assert files
    parts = {(file.name, part) for file in files for name in imported(file) for part in name.split(".")}
    assert [(file, part) for file, part in parts if part.startswith("test_") or part == "conftest"] == []


def test_every_mutation_finds_the_text_that_it_changes_and_its_tests() -> None:
    mutations = read_table()
    assert misplaced(mutations) == []
    assert len(mutations) - MOST_ALIVE >= 31
    assert all(mutation.new != mutation.old for mutation in mutations)


def test_ci_installs_versions_that_the_project_asks_for_and_the_lock_file_names_no_place() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    lock = (ROOT / "requirements" / "ci.txt").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==([\w.]+) ", lock, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]]
    names = {each.name: canonicalize_name(each.name) for each in asked if each.name != "torch"}
    assert sorted(name for name in names.values() if name not in locked) == [], "run `make lock`"
    assert [str(each) for each in asked if each.name in names and locked[names[each.name]] not in each.specifier] == []
    assert not re.search(r"://|--(extra-)?index-url|--find-links| @ ", lock)
