"""What transformers' own class counts of a model: as shipped for the bundled ones, or asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ladder.text import digest_of
from ladder.workload.workload import Task

_SAID = 160
"""Characters of what transformers says. Chosen: two lines."""


@dataclass(frozen=True)
class Counted:
    """What `ladder.trial.count` found of a configuration."""

    tasks: tuple[Task, ...] = ()
    """Those that the model can be trained for, the usual one first; none for a model of anything but text."""
    sizes: Mapping[str, Any] | None = None
    """Fields of ModelShape, and `is_recurrent`; None if the model cannot be trained for the task that was asked for."""
    spellings: Sequence[str] | None = None
    """Names like that of the model's type, where transformers does not know it; None where it does."""
    refused: str = ""
    """Why peft does not take the adapters that it was asked about, in its own words."""
    problem: str = ""
    """Why there is nothing: a sentence without its full stop."""


Count = Callable[[Mapping[str, Any], Task | None, Mapping[str, Any] | None], Counted]
"""Counts the model of a checked configuration for a task, or for its usual one; with adapters as LoraConfig has them,
or with none."""


def counted_from(reply: Mapping[str, Any]) -> Counted:
    """What a reply of `ladder.trial.count` says."""
    if "tasks" in reply:
        return Counted(tasks=tuple(reply["tasks"]), sizes=reply.get("sizes"), refused=_cut(reply.get("refused", "")))
    if "unknown" in reply:
        return Counted(spellings=tuple(reply["unknown"]))
    return Counted(problem=f"transformers cannot build it ({_cut(reply['failed'])})")


def _cut(text: Any) -> str:
    return " ".join(str(text).split())[:_SAID]


def digest(config: Mapping[str, Any]) -> str:
    """By which what is counted of `config` is kept."""
    return digest_of(dict(config), 16)


def shipped(config: Mapping[str, Any], task: Task | None) -> Counted | None:
    """What was counted of a bundled model with exactly this `config`, for its usual task; None for all others."""
    reply = _all_shipped().get(digest(config))
    if reply is None or task not in (None, reply["tasks"][0]):
        return None
    return counted_from(reply)


@cache
def _all_shipped() -> dict[str, dict[str, Any]]:
    """By digest: the replies for the bundled models, which `scripts/count_bundled.py` writes."""
    replies: dict[str, dict[str, Any]] = {}
    for folder in FOLDERS:
        for path in sorted(folder.glob("*.json")):
            replies |= json.loads(path.read_text(encoding="utf-8"))
    return replies


def _folders() -> list[Path]:
    package = Path(__file__).resolve().parent.parent
    # In a wheel configs/ is inside the package; in a checkout it is beside the package.
    found = (package / "configs" / "counted", package.parent / "configs" / "counted")
    return [next((folder for folder in found if folder.parent.is_dir()), found[0])]


FOLDERS = _folders()
"""Where replies are kept that come with ladder."""
