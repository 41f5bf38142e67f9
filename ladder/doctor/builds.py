"""What to do if an operator of DeepSpeed cannot be built."""

from __future__ import annotations

import re

from ladder.machine.host import compiler
from ladder.machine.interpreter import program_found

_KILLED = re.compile(r"its build was killed by signal (\d+)")
_OUT_OF_MEMORY_KILLER = 9
"""SIGKILL (defined by POSIX): the kernel sends it to a compiler when memory runs out."""
_PACKAGES = {"async_io": "libaio-dev"}


def fix_of_build(name: str, reason: str) -> str:
    """The remedy for the `reason` that `build_operators` gave for this operator, without a full stop."""
    if reason.startswith("[Errno "):  # the build folder; a missing compiler gives another error
        return "set TORCH_EXTENSIONS_DIR to a folder that you can write to"
    if (killed := _KILLED.fullmatch(reason)) is not None:
        if int(killed[1]) == _OUT_OF_MEMORY_KILLER:
            return "free some host memory, because the kernel kills compilers when it runs out"
        return "let it finish, because something outside ladder killed it"
    if reason.startswith("its build was stopped"):
        return "stop other work on this machine's cores, because a build may take 15 minutes at most"
    if program_found(compiler()) is None:
        return "install a C++ compiler (Debian and Ubuntu: apt-get install g++)"
    if (package := _PACKAGES.get(name)) is not None:
        return f"install the library's headers (Debian and Ubuntu: apt-get install {package})"
    return f"install a {compiler()} that compiles C++17 and the headers of this Python (python3-dev)"
