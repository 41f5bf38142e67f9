"""Environments that have a part of what this one has, or other versions."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

OF_TRAINING = ("torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "datasets", "bitsandbytes")
OF_LADDER = ("oom-ladder", "optuna", "nvidia-ml-py", "typer", "rich", "jinja2", "pydantic", "huggingface-hub")


def environment(folder: Path, *, without: tuple[str, ...], also: str = "") -> Path:
    """The interpreter of a new environment in `folder`: it has what this one has, but for these distributions.

    `also` is one more folder on its sys.path.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    here = Path(sysconfig.get_path("purelib"))
    left_out = {name for each in without for name in _top_level(each)}
    for each in here.iterdir():
        if each.name not in left_out and each.suffix != ".pth":
            (packages / each.name).symlink_to(each)
    if also:
        (packages / "also.pth").write_text(f"{also}\n")
    return folder / "bin" / "python"


def installed(folder: Path, *steps: str) -> Path:
    """The interpreter of a new environment in `folder`, with what pip installs in these steps."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    for each in steps:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *each.split()], check=True)
    return python


def _top_level(distribution: str) -> set[str]:
    """What it has installed in the folder of packages."""
    try:
        files = metadata.distribution(distribution).files or ()
    except metadata.PackageNotFoundError:
        return set()
    folder = re.sub(r"[-_.]+", "_", distribution).lower()
    return {each.parts[0] for each in files if each.parts[0] not in ("..", "__pycache__")} | {folder}
