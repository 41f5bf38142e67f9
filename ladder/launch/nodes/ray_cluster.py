"""Nodes of a Ray cluster, on which an actor starts programs. Ray itself is imported by `ray_pipe` alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ladder.errors import EnvironmentFaultError, UsageError
from ladder.launch.modules import asked, module_command
from ladder.launch.nodes.connection import Node
from ladder.text import shown

_PIPE = "ladder.launch.nodes.ray_pipe"
_ANSWER_SECONDS = 30.0
"""For Ray to list its nodes. Chosen: to import Ray and connect takes some 5 s."""


def ray_nodes(count: int, gpus: int | None) -> list[Node]:
    """`count` nodes of the cluster that RAY_ADDRESS names, or of this host's, with `gpus` GPUs on each (None: all).

    UsageError without Ray; EnvironmentFaultError if there is no cluster, or too small a one.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--launcher ray needs Ray; install it with: pip install 'oom-ladder[ray]'")
    listed = _listed()
    fit = [each for each in listed if each["gpus"] >= (gpus or 0)]
    if len(fit) < count:
        having = f" with {gpus} GPUs" if gpus else ""
        raise EnvironmentFaultError(
            f"--nodes {count} asks for more than the {len(fit)} nodes{having} of the Ray cluster; "
            "use fewer, or add nodes."
        )
    # Those with most GPUs first: without --gpus all are used, and nodes have to be alike.
    chosen = sorted(fit, key=lambda each: (-each["gpus"], each["id"]))[:count]
    names = Counter(each["name"] for each in chosen)
    return [_node(each, gpus, is_unique=names[each["name"]] == 1) for each in chosen]


def _node(described: dict[str, Any], gpus: int | None, *, is_unique: bool) -> Node:
    node, reserved = described["id"], described["gpus"] if gpus is None else gpus

    def command(program: Sequence[str]) -> list[str]:
        return module_command(_PIPE, node, str(reserved), *program)

    name = described["name"] if is_unique else f"{described['name']}-{node[:8]}"
    return Node(name=name, command=command)


def _listed() -> list[dict[str, Any]]:
    try:
        said = asked(_PIPE, "--list", seconds=_ANSWER_SECONDS, changes=os.environ)
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or str(error)
        last = shown(said.strip().splitlines()[-1]) if said.strip() else ""
        raise EnvironmentFaultError(
            f"No Ray cluster answers ({last}); start one with `ray start --head`, or set RAY_ADDRESS."
        ) from None
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]
