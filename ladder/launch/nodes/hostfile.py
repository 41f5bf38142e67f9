"""Nodes named in a hostfile of DeepSpeed's format, `name slots=N` on each line, reached by ssh."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from ladder.errors import EnvironmentFaultError, UsageError
from ladder.launch.nodes.connection import Node
from ladder.text import shown

_CONNECT_SECONDS = 10
"""For ssh to reach a host. Chosen: far longer than a network of one site needs."""


def hostfile_nodes(path: Path, count: int | None) -> tuple[list[Node], int]:
    """The first `count` nodes of the file (None: all), and the slots that each has.

    UsageError if the file cannot be read. EnvironmentFaultError if a host is named twice, if slots differ, or if there
    are fewer than `count` hosts.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile {path} cannot be read ({error}); name a file of lines `host slots=N`.") from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not (line := line.partition("#")[0].strip()):
            continue
        found = re.fullmatch(r"([\w.@:%\[\]-]+)\s+slots=(\d+)", line)
        if found is None or found[1].startswith("-") or found[2] == "0":
            raise UsageError(f"--hostfile {path}, line {number}: {shown(line)} is not `host slots=N`; correct it.")
        if found[1] in slots:
            raise EnvironmentFaultError(f"--hostfile {path} names {found[1]} twice; leave one of the lines out.")
        slots[found[1]] = int(found[2])
    if not slots:
        raise UsageError(f"--hostfile {path} names no host; write lines `host slots=N`.")
    names = list(slots)[: count or len(slots)]
    if count is not None and len(names) < count:
        raise EnvironmentFaultError(
            f"--nodes {count} asks for more than the {len(names)} hosts of {path}; use --nodes {len(names)}, or "
            "add hosts."
        )
    if len({slots[name] for name in names}) > 1:
        uneven = ", ".join(f"{name} {slots[name]}" for name in names)
        raise EnvironmentFaultError(
            f"The hosts of {path} have different numbers of slots ({uneven}), and every node runs as many ranks; give "
            "all the smallest number."
        )
    return [_node(name) for name in names], slots[names[0]]


def _node(name: str) -> Node:
    def command(program: Sequence[str]) -> list[str]:
        # In the same folder: paths of the command line may be relative. BatchMode: nobody can answer a question.
        there = f"cd -- {shlex.quote(os.getcwd())} && exec {shlex.join(program)}"
        return ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", "--", name, there]

    return Node(name=name, command=command)
