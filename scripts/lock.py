"""Write `requirements/ci.txt`, the exact packages that CI installs: `python scripts/lock.py`.

It runs under Python 3.11 on Linux, installs what ladder and its `dev` extra need into a new environment, beside the
torch that CI takes, and records what came, with the hashes that the package index publishes. torch itself is left out:
its builds for CPU and for CUDA share a version.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "ci.txt"
TORCH = "torch==2.13.0"
"""The version that `.ci/run` installs first. A range would take a newer build with gigabytes of CUDA."""

HEADER = f"""\
# Written by scripts/lock.py for Python 3.11 on Linux without a GPU; do not edit.
# `pip install {TORCH}` comes first, then `pip install --no-deps --require-hashes -r requirements/ci.txt`.
"""


def main() -> int:
    if sys.version_info[:2] != (3, 11) or sys.platform != "linux":
        print("The lock file is for Python 3.11 on Linux; run this script there.")
        return 2
    with tempfile.TemporaryDirectory(prefix="ladder-lock-") as folder:
        versions = installed_versions(Path(folder))
        text = with_hashes(versions, Path(folder))
    wrong = places_in(text)
    if wrong:
        print(f"The lock file would name a place of this machine or an index: {wrong}.")
        return 1
    LOCK.parent.mkdir(exist_ok=True)
    LOCK.write_text(HEADER + text)
    print(f"{LOCK.relative_to(ROOT)}: {len(versions)} packages")
    return 0


def installed_versions(folder: Path) -> list[str]:
    """`name==version` of all that ladder and its development need, apart from torch and ladder themselves."""
    environment = folder / "venv"
    venv.create(environment, with_pip=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--quiet"]
    extra = development_requirements()
    subprocess.run([*pip, "install", TORCH], check=True)
    subprocess.run([*pip, "install", *extra], check=True)
    frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
    return [line for line in frozen.splitlines() if not line.startswith("torch==")]


def development_requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    needed: list[str] = project["project"]["dependencies"] + extras["train"] + extras["dev"]
    needed = [each for each in needed if not each.startswith("oom-ladder")]
    # To install ladder itself in place, `hatchling` needs `editables`.
    return [*needed, *project["build-system"]["requires"], "editables"]


def with_hashes(versions: list[str], folder: Path) -> str:
    """The same lines, each with the hashes of its files on the package index."""
    exact = folder / "exact.txt"
    exact.write_text("\n".join(versions) + "\n")
    tools = folder / "tools"
    venv.create(tools, with_pip=True)
    subprocess.run([str(tools / "bin" / "python"), "-m", "pip", "--quiet", "install", "uv"], check=True)
    options = ["--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-config"]
    # Only ladder's own Python and system matter: hashes of wheels for others would be most of the file.
    options += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    uv = [str(tools / "bin" / "uv"), "pip", "compile", "--quiet", *options, str(exact)]
    surroundings = {**os.environ, "UV_SYSTEM_CERTS": "1"}
    return subprocess.run(uv, check=True, capture_output=True, text=True, env=surroundings).stdout


def places_in(text: str) -> list[str]:
    return sorted(set(re.findall(r"(?:https?|file)://\S*|--(?:extra-)?index-url\S*|--find-links\S*| @ \S+", text)))


if __name__ == "__main__":
    sys.exit(main())
