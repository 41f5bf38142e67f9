"""Ask pip-audit whether an installed package has a published weakness: `python scripts/audit.py`.

Exit status 1 if one has. Where the database cannot be reached nothing is known, which is said, with exit status 0: a
machine without internet can still run CI.
"""

from __future__ import annotations

import json
import subprocess
import sys


def main() -> int:
    run = subprocess.run(
        [sys.executable, "-m", "pip_audit", "--skip-editable", "--format", "json", "--progress-spinner", "off"],
        check=False,
        capture_output=True,
        text=True,
    )
    try:
        packages = json.loads(run.stdout)["dependencies"]
    except (ValueError, KeyError):
        words = run.stderr.strip().splitlines() or ["no answer"]
        print(f"Not audited: pip-audit cannot reach its database ({words[-1]}).")
        return 0
    audited = [package for package in packages if "vulns" in package]
    weak = [package for package in audited if package["vulns"]]
    for package in weak:
        names = ", ".join(weakness["id"] for weakness in package["vulns"])
        print(f"{package['name']} {package['version']} has published weaknesses: {names}")
    if not audited:
        print("Not audited: pip-audit's database knows none of the packages, so it cannot be the real one.")
    else:
        print(f"Audited {len(audited)} of {len(packages)} packages; {len(weak)} have published weaknesses.")
    return 1 if weak else 0


if __name__ == "__main__":
    sys.exit(main())
