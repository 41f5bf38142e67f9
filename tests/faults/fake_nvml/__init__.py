"""A machine with fake GPUs: programs see it through the real nvidia-ml-py and a library of ours under it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

_SOURCE = Path(__file__).parent / "fake_nvml.c"


@dataclass
class FakeGpus:
    """The fake machine in `folder`; `setting` changes it at once for every program that looks."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.control = self.folder / "gpus.txt"
        self.environment |= {"FAKE_NVML": str(self.control), "LADDER_LEASES": str(self.folder / "leases")}
        self.settings: dict[str, float] = {}

    def build(self, *defines: str) -> FakeGpus:
        """Compile the library; `defines` are OLD or ANCIENT."""
        library = self.folder / "lib"
        library.mkdir(exist_ok=True)
        options = [f"-D{define}" for define in defines]
        command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", *options, "-o", str(library / "libnvidia-ml.so.1")]
        subprocess.run([*command, str(_SOURCE)], check=True, timeout=60)
        self.environment["LD_LIBRARY_PATH"] = str(library)
        return self

    def set(self, **settings: float) -> None:
        self.settings |= settings
        temporary = self.control.with_suffix(".new")
        temporary.write_text("".join(f"{key} {value!r}\n" for key, value in self.settings.items()))
        temporary.replace(self.control)

    def start(self, code: str, **environment: str) -> subprocess.Popen[str]:
        """Python that runs `code` on this machine."""
        inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={**inherited, **self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, **environment: str) -> str:
        """What `code` prints, or the kind and sentence of the ladder's error that ends it."""
        process = self.start(f"{_PROLOGUE}\ntry:\n{_indented(code)}\n{_EPILOGUE}", **environment)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return output.strip()

    def tune(self, *arguments: str, folder: Path) -> subprocess.Popen[str]:
        """`ladder tune` on this machine, in `folder`."""
        code = (
            f"import os, sys; os.chdir({str(folder)!r}); from ladder.cli.main import main; sys.exit(main(sys.argv[1:]))"
        )
        inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return subprocess.Popen(
            [sys.executable, "-c", code, "tune", *arguments],
            env={**inherited, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


_PROLOGUE = """\
from ladder.errors import LadderError
import time, pynvml
from ladder.machine.gpus import obstacle, visible_gpus
from ladder.machine.machine import detect_machine
from ladder.machine.lease import Leases
from ladder.launch.nvml import Gpus, Sampler"""
_EPILOGUE = """\
except LadderError as error:
    print(f"{type(error).__name__} {error.exit_code}: {error}")"""


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.splitlines())
