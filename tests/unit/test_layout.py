"""Rules of the repository that no other tool holds: imports in tests/, who knows what is registered, what mutations
break, what CI installs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from mutate import MOST_ALIVE, misplaced, read_table
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ladder.backends.registry import BACKENDS, RUNGS_BY_NAME
from ladder.emit.exporters.registry import EXPORTERS
from ladder.optimizers.registry import OPTIMIZERS
from ladder.techniques.registry import TECHNIQUES, WAYS_OF_CHECKPOINTING

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
    extras = project["optional-dependencies"]
    asked = [Requirement(text) for text in project["dependencies"] + extras["train"] + extras["dev"]]
    names = {each.name: canonicalize_name(each.name) for each in asked if each.name not in ("torch", "oom-ladder")}
    assert sorted(name for name in names.values() if name not in locked) == [], "run `make lock`"
    assert [str(each) for each in asked if each.name in names and locked[names[each.name]] not in each.specifier] == []
    assert not re.search(r"://|--(extra-)?index-url|--find-links| @ ", lock)


@cache
def product() -> dict[str, ast.Module]:
    files = sorted((ROOT / "ladder").rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): ast.parse(file.read_text()) for file in files}


@cache
def imports() -> list[tuple[str, str]]:
    """By module: what it imports, to the last name."""
    return [
        (name, ".".join(filter(None, [getattr(node, "module", ""), alias.name])))
        for name, tree in product().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]


def is_in(name: str, *rooms: str) -> bool:
    """Whether the module `name` is one of `rooms`, or in one that is a package."""
    return any(f"{name}.".startswith(f"{room}.") for room in rooms)


ROOMS = {type(backend).__module__.rpartition(".")[0] for backend in BACKENDS.values()}
ROOMS |= {
    type(each).__module__
    for each in (*TECHNIQUES.values(), *WAYS_OF_CHECKPOINTING.values(), *EXPORTERS.values(), *OPTIMIZERS.values())
}
"""Of what is registered: a module each, or a backend's package."""


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_only_its_registry_knows_the_room_of_a_backend_a_technique_or_an_exporter(room: str) -> None:
    parent = room.rpartition(".")[0]
    known_to = [room, room.replace("ladder.", "ladder.trial.", 1), f"{parent}.registry"]
    assert [(name, other) for name, other in imports() if is_in(other, room) and not is_in(name, *known_to)] == []


def test_no_file_compares_anything_with_the_name_of_an_optimizer() -> None:
    nodes = [(name, node) for name, tree in product().items() for node in ast.walk(tree)]
    compared = [(name, ast.unparse(node)) for name, node in nodes if isinstance(node, ast.Compare)]
    assert [each for each in compared if set(re.findall(r"'(\w+)'", each[1])) & set(OPTIMIZERS)] == []


def test_no_file_names_a_rung_or_asks_for_the_name_of_its_backend() -> None:
    rungs = set(RUNGS_BY_NAME)
    found = [
        (name, node.lineno)
        for name, tree in product().items()
        if not is_in(name, "ladder.backends")
        for node in ast.walk(tree)
        if (isinstance(node, ast.Constant) and node.value in rungs)
        or (isinstance(node, ast.Attribute) and node.attr == "backend" and ast.unparse(node.value).endswith("rung"))
    ]
    assert found == []
