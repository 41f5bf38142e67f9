"""Rules of the repository that no other tool holds: who may import whom in tests/, and what is broken by mutations."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutate import MOST_ALIVE, misplaced, read_table

TESTS = Path(__file__).parents[1]


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
