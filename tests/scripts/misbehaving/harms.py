# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""Harms the folders that HARMED names, before, during and after its training. It catches what is refused."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def folder_to_harm(folder: Path, elsewhere: Path) -> None:
    """Fill a folder with what `harm` looks for; `elsewhere` has a file that links in it lead to."""
    for name in ("kept", "truncated", "deleted", "renamed", "by_child", "appended", "mode"):
        (folder / name).write_text(f"{name} of the user")
    for name in ("tree", "tree-to-move", "tree-by-child"):
        (folder / name / "deep").mkdir(parents=True)
        (folder / name / "deep" / "file").write_text("of the user")
    (elsewhere / "target").write_text("of the user")
    (folder / "link").symlink_to(elsewhere / "target")
    os.link(elsewhere / "target", folder / "hard-link")


def harm(folder: Path) -> None:
    rm = ["rm", "-rf", str(folder / "tree-by-child"), str(folder / "by_child")]
    ways: list[Callable[[], object]] = [
        lambda: (folder / "kept").write_text("harmed"),
        lambda: os.truncate(folder / "truncated", 3),
        (folder / "deleted").unlink,
        lambda: os.rename(folder / "renamed", folder / "renamed-away"),
        lambda: os.rename(folder / "tree-to-move", folder / "tree-moved"),
        lambda: shutil.rmtree(folder / "tree"),
        (folder / "tree").mkdir,
        lambda: (folder / "link").write_text("harmed"),
        lambda: (folder / "hard-link").write_text("harmed"),
        lambda: subprocess.run(rm, check=True, stderr=subprocess.DEVNULL),
        lambda: (folder / "new").write_text("harmed"),
        lambda: os.replace(folder / "new", folder / "appended"),
        lambda: (folder / "mode").chmod(0o777),
    ]
    for way in ways:
        with suppress(OSError, subprocess.CalledProcessError):
            way()


def harm_all() -> None:
    for folder in os.environ["HARMED"].splitlines():
        harm(Path(folder))


def harm_later() -> None:
    """Leave a process behind that goes on with it, is nobody's child and makes little of SIGTERM."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ctypes.CDLL(None).signal(15, 1)
            while True:
                time.sleep(0.2)
                harm_all()
        os._exit(0)
    os.wait()


def main() -> None:
    harm_all()
    harm_later()
    from few import collate, texts, trainer
    from transformers import AutoModelForCausalLM, TrainingArguments

    found = texts()

    def harming(samples: Any) -> Any:
        harm_all()
        return collate(samples)

    Path("log.txt").write_text("its own working folder takes files")
    os.chdir(sys.argv[1])
    harmful = trainer(
        TrainingArguments(output_dir="out", max_steps=4, report_to="none"),
        model=AutoModelForCausalLM.from_pretrained(os.path.join(os.environ["HARMED"].splitlines()[0], "../model")),
        train_dataset=found,
        data_collator=harming,
    )
    harmful.train()
    harm_all()


if __name__ == "__main__":
    main()
