"""Break a number or a line of a formula, and see whether the unit tests notice: `python scripts/mutate.py [NAME …]`.

`mutations.yaml`, beside this file, lists what is broken and why it matters. Each mutation is made alone, in a copy of
the tree: first its own tests run, then, where they pass, all unit tests. A mutation that they all survive is alive.
Exit status 1 if more than `MOST_ALIVE` are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("mutations.yaml")
MOST_ALIVE = 3
UNIT = "tests/unit"
OF_THE_TABLE = f"{UNIT}/test_layout.py"
"""Looks for the very text that a mutation changes, so it would notice each of them."""
_LONGEST_SECONDS = 600
"""A mutation may make a search endless; that counts as noticed."""


@dataclass(frozen=True)
class Mutation:
    """One change to one place in the code."""

    name: str
    file: str
    old: str
    """Found exactly once in `file`."""
    new: str
    why: str
    """What goes wrong for the user if nobody notices."""
    tests: tuple[str, ...]
    """The test modules that are to notice, by their names in tests/unit."""

    def found(self, root: Path) -> int:
        """How often the text to change is in the code."""
        path = root / self.file
        return path.read_text().count(self.old) if path.is_file() else 0

    def make(self, root: Path) -> None:
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))

    def undo(self, root: Path) -> None:
        shutil.copy2(ROOT / self.file, root / self.file)


def read_table() -> list[Mutation]:
    rows = yaml.safe_load(TABLE.read_text())
    return [Mutation(**{**row, "name": name, "tests": tuple(row["tests"])}) for name, row in rows.items()]


def misplaced(mutations: Sequence[Mutation], root: Path = ROOT) -> list[str]:
    """A sentence for each mutation whose text is not found exactly once, or whose tests are not there."""
    counts = [(mutation, mutation.found(root)) for mutation in mutations]
    lost = [
        f"{each.name}: {each.old!r} is in {each.file} {count} times, not once" for each, count in counts if count != 1
    ]
    missing = [(each, name) for each in mutations for name in each.tests if not (root / UNIT / f"{name}.py").is_file()]
    return lost + [f"{each.name}: there is no {UNIT}/{name}.py" for each, name in missing]


def passes(copy: Path, tests: Sequence[str]) -> bool:
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--ignore={OF_THE_TABLE}"]
    command = [sys.executable, "-B", "-m", "pytest", *options, *tests]
    # The copy comes before the tree that is installed in place.
    surroundings = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(
            command, cwd=copy, env=surroundings, check=False, capture_output=True, timeout=_LONGEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def noticed_by(mutation: Mutation, copy: Path) -> str:
    """The tests that fail with the mutation; empty if none does."""
    mutation.make(copy)
    try:
        own = [f"{UNIT}/{name}.py" for name in mutation.tests]
        if own and not passes(copy, own):
            return ", ".join(mutation.tests)
        return "" if passes(copy, [UNIT]) else UNIT
    finally:
        mutation.undo(copy)


def main(names: Sequence[str]) -> int:
    mutations = [each for each in read_table() if not names or each.name in names]
    problems = misplaced(mutations) + [f"no mutation is called {name}" for name in names_unknown(mutations, names)]
    if problems:
        print("The table does not match the code:", *problems, sep="\n  ")
        return 2
    alive = []
    with tempfile.TemporaryDirectory(prefix="ladder-mutations-") as folder:
        copy = Path(folder) / "tree"
        leave_out = shutil.ignore_patterns(".git", ".*_cache", "__pycache__", ".venv", "ladder-runs")
        shutil.copytree(ROOT, copy, ignore=leave_out)
        if not passes(copy, [UNIT]):
            print("The unit tests fail as they are; mend that first.")
            return 2
        for mutation in mutations:
            began = time.monotonic()
            by = noticed_by(mutation, copy)
            print(
                f"{'killed' if by else 'ALIVE '} {time.monotonic() - began:5.1f} s  {mutation.name}  {by}", flush=True
            )
            alive += [] if by else [mutation]
    for mutation in alive:
        print(f"  alive: {mutation.name} ({mutation.file}): {mutation.why}")
    print(f"{len(mutations) - len(alive)} of {len(mutations)} mutations were killed.")
    return 1 if len(alive) > MOST_ALIVE else 0


def names_unknown(mutations: Sequence[Mutation], names: Sequence[str]) -> list[str]:
    return sorted(set(names) - {mutation.name for mutation in mutations})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
