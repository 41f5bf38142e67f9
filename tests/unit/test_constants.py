"""Rules for reading the code: a number says where it comes from, and a function is seen at once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

LADDER = Path(__file__).parents[2] / "ladder"
FILES = {file.relative_to(LADDER).as_posix(): file for file in sorted(LADDER.rglob("*.py"))}
UNITS = ("KIB", "MIB", "GIB")
MOST_LINES = 50

WITHOUT_ORIGIN = {
    "cli/console.py": "widths of terminals, chosen by eye",
    "report/table.py": "widths of terminals, chosen by eye",
    "simulation/launcher.py": "numbers of signals, which their names say",
    "simulation/physics.py": "one comment speaks of several constants below it",
    "options/tune.py": "the help of the option says what it is",
}
"""Files with constants that bear neither comment nor docstring, and why those can be read all the same."""
ORIGIN = re.compile(r"\b(measured|seen|derived|chosen|defined|fitted|estimate)\b", re.IGNORECASE)
ROOMS_WITH_ORIGINS = (
    "backends", "candidates", "doctor", "events", "launch", "machine", "options", "runs", "search", "trial", "tuning",
    "watch", "workload",
)  # fmt: skip
"""Here a comment alone is not enough: it has to say how the number was found."""


def is_number(node: ast.expr) -> bool:
    """A number, or arithmetic with one; also a tuple of them."""
    if isinstance(node, ast.Tuple):
        return bool(node.elts) and all(map(is_number, node.elts))
    parts = list(ast.walk(node))
    if any(
        isinstance(part, (ast.Call, ast.Attribute, ast.Subscript, ast.List, ast.Dict, ast.Compare)) for part in parts
    ):
        return False
    numbers = [part.value for part in parts if isinstance(part, ast.Constant)]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    if not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers):
        return False
    return bool(numbers) or (bool(names) and all(name in UNITS for name in names))


def constants(text: str) -> Iterator[tuple[str, str]]:
    """Each number of a module with the comment or docstring that goes with it."""
    lines, body = text.splitlines(), ast.parse(text).body
    for number, node in enumerate(body):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None or not is_number(node.value):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        said = re.findall(r"#.*", "\n".join(lines[node.lineno - 1 : node.end_lineno]))
        above = node.lineno - 2
        while above >= 0 and lines[above].startswith("#"):
            said.append(lines[above])
            above -= 1
        match body[number + 1 : number + 2]:
            case [ast.Expr(value=ast.Constant(value=str(docstring)))]:
                said.append(docstring)
        yield ast.unparse(target), " ".join(said)


@pytest.mark.parametrize("name", sorted(FILES.keys() - WITHOUT_ORIGIN.keys()))
def test_every_number_says_where_it_comes_from(name: str) -> None:
    is_strict = name.split("/")[0] in ROOMS_WITH_ORIGINS
    found = constants(FILES[name].read_text())
    silent = [number for number, said in found if not (ORIGIN.search(said) if is_strict else said)]
    assert silent == []


def test_no_exception_outlives_its_reason() -> None:
    assert [name for name in WITHOUT_ORIGIN if all(said for _, said in constants(FILES[name].read_text()))] == []


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("cli/")])
def test_no_function_is_longer_than_a_screen(name: str) -> None:
    functions = [
        (node.name, node.end_lineno - node.lineno + 1)
        for node in ast.walk(ast.parse(FILES[name].read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None
    ]
    assert [(function, lines) for function, lines in functions if lines > MOST_LINES] == []
