"""What takes too long for each merge: `python scripts/night.py [PART …]`, which is `make night`.

Each part is one command. Its result, seconds and last line go into benchmarks/results/night.json, with the date and the
commit, and a line about all of them into CONTRIBUTING.md. Commit both. Exit status 1 if a part failed.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "night.json"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- night: written by scripts/night.py -->", "<!-- end of night -->"
_ENVIRONMENTS = "tests/process/test_environments.py"
PARTS: dict[str, Sequence[str]] = {
    "environments": ("-m", "pytest", "--quiet", "-m", "night", _ENVIRONMENTS),
    "contracts": ("-m", "pytest", "--quiet", "-m", "night", "tests/contracts"),  # every type that transformers has
    "tests": ("-m", "pytest", "--quiet", "-m", "night", f"--ignore={_ENVIRONMENTS}", "--ignore=tests/contracts"),
    "mutations": ("scripts/mutate.py",),
    "soak": ("benchmarks/soak.py", "--simulated", "50", "--real", "10"),
}


def result_of(command: Sequence[str]) -> dict[str, Any]:
    """Run `command`, and say how it ended; what it prints goes to the terminal too."""
    began, last = time.monotonic(), ""
    with subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return {
        "passed": process.returncode == 0,
        "said": last.strip("= "),
        "seconds": round(time.monotonic() - began),
        "date": datetime.date.today().isoformat(),
        "commit": _git("rev-parse", "--short=10", "HEAD"),
    }


def line_of(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The line of CONTRIBUTING.md: when each part ran last, and how it ended."""
    said = (
        f"{name}: {'passed' if each['passed'] else 'FAILED'} on {each['date']} at {each['commit']} "
        f"({each['said']}; {each['seconds'] / 60:.0f} min)"
        for name, each in results.items()
    )
    return f"**Last nights.** {'. '.join(said)}."


def main(names: Sequence[str]) -> int:
    """Run the parts with these names, or all."""
    if unknown := set(names) - PARTS.keys():
        print(f"There is no part {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}.")
        return 2
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    chosen = [name for name in PARTS if not names or name in names]
    for name in chosen:
        results[name] = result_of(PARTS[name])
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{line_of(results)}\n{END}{after}")
    return 0 if all(results[name]["passed"] for name in chosen) else 1


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
