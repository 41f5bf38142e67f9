"""The wheel, built and installed into a fresh environment: the command starts there and finds its bundled files."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*argv: str | Path, folder: Path) -> str:
    """What the command prints, started in `folder`."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in argv]
    done = subprocess.run(words, check=False, capture_output=True, text=True, cwd=folder, env=clean, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel; what it depends on comes from the running one."""
    folder = tmp_path_factory.mktemp("wheel")
    # Without hatchling pip fetches it into an environment of its own for the build.
    isolation = ["--no-build-isolation"] if find_spec("hatchling") else []
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--quiet", "--no-deps", *isolation, "--wheel-dir", folder, ROOT, folder=folder)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.startswith("oom_ladder-")
    venv.create(folder / "fresh", with_pip=False, symlinks=True)
    python = folder / "fresh" / "bin" / "python"
    run(*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel, folder=folder)
    (site,) = (folder / "fresh").glob("lib/python*/site-packages")
    # A line of a .pth file is put behind what is installed here, and .pth files in that folder are not followed.
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in others))
    return folder / "fresh" / "bin"


def test_the_installed_command_says_its_version_and_holds_the_bundled_models_and_machines(
    programs: Path, tmp_path: Path
) -> None:
    from ladder import __version__

    assert run(programs / "ladder", "--version", folder=tmp_path).splitlines()[0] == f"ladder {__version__}"
    place = run(programs / "python", "-c", "import ladder; print(ladder.__file__)", folder=tmp_path)
    assert Path(place.strip()).is_relative_to(programs.parent)
    planned = run(programs / "ladder", "plan", "llama-2-7b", "--machine", "a100-40", folder=tmp_path)
    assert "zero3" in planned
