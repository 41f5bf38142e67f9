"""Where the seconds of the tests go: `python scripts/slowest.py FOLDER`, with pytest's `--junitxml` files in FOLDER.

Prints the seconds of each folder of tests, and the slowest 60 tests with their fixtures' seconds. `.ci/run` ends with
it; with `REPORTS=FOLDER .ci/run` the files are kept.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

_MOST = 60


def seconds_by_test(folder: Path) -> dict[str, float]:
    """Of all reports in `folder`, by `tests/unit/test_x::test_y`; a test's fixtures count as its own."""
    found: dict[str, float] = {}
    for report in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
            found[name] = found.get(name, 0.0) + float(case.get("time", 0))
    return found


def main(folder: Path) -> None:
    """Print both tables."""
    tests = seconds_by_test(folder)
    folders: dict[str, list[float]] = {}
    for name, seconds in tests.items():
        folders.setdefault(name.partition("::")[0].rpartition("/")[0], []).append(seconds)
    print("seconds  tests  folder")
    for place, each in sorted(folders.items(), key=lambda pair: -sum(pair[1])):
        print(f"{sum(each):7.0f}  {len(each):5}  {place}")
    print(f"\nseconds  the slowest {_MOST}")
    for name, seconds in sorted(tests.items(), key=lambda pair: -pair[1])[:_MOST]:
        print(f"{seconds:7.1f}  {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
