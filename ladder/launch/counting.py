"""Has transformers count the parameters of a model, in a process of its own, and keeps what it found."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ladder import __version__
from ladder.launch.modules import asked
from ladder.machine.cache import cache_folder, keep
from ladder.machine.interpreter import has_module, ranks_python, version_of
from ladder.techniques.registry import TECHNIQUES
from ladder.workload.config_guard import shorten
from ladder.workload.counted import Count, Counted, counted_from
from ladder.workload.workload import Task

_SECONDS = 300.0
"""Chosen: thirty times what counting takes on an idle core. The program itself ends what computes for too long."""
_REPLY = "8"
"""Of what the program writes, the version."""
_REPLACING = {each.name: each.rank_module for each in TECHNIQUES.values() if each.replaces_kernels}
COUNTED_BY = (
    *("transformers", "torch", "peft"),
    *(library.distribution for name in _REPLACING for library in TECHNIQUES[name].libraries),
)
"""Packages that decide what is counted."""
_PASSING = ("ImportError", "ModuleNotFoundError", "MemoryError", "OSError", "TooLong")
"""Failures that may be gone tomorrow: a package is there by then, there is more memory, or the host is less busy."""


def counting(note: Callable[[str], None] = lambda _: None) -> Count:
    """For `resolve_model`: counts with transformers. `note` gets a sentence before a wait of seconds."""
    return partial(_count, note)


def _count(
    note: Callable[[str], None], config: Mapping[str, Any], task: Task | None, lora: Mapping[str, Any] | None
) -> Counted:
    if not (has_module("torch") and has_module("transformers")):
        return Counted(
            problem=f"torch and transformers, which count it, are not installed for {ranks_python()}; name an "
            "interpreter that has them with --python"
        )
    question = asked_of(config, task, lora)
    kept = _file_of(question)
    reply = _read(kept)
    if reply is None:
        by = "transformers" if lora is None else "peft"
        note(f"Counting what model type {shorten(config['model_type'])} has with {by}, once.")
        reply = ask(question)
        if reply and not any(str(reply.get(key, "")).startswith(_PASSING) for key in ("failed", "uncounted")):
            keep(kept, reply)  # without it the next call counts again
    return counted_from(reply) if reply else Counted(problem="counting what it has ended without an answer; try again")


def asked_of(config: Mapping[str, Any], task: Task | None, lora: Mapping[str, Any] | None = None) -> str:
    """What the program is asked of `config`, `task` and adapters, as JSON."""
    question = {"config": config, "task": task, "replacing": _REPLACING}
    return json.dumps(question if lora is None else question | {"lora": lora}, sort_keys=True)


def ask(question: str) -> dict[str, Any] | None:
    """What the program replies to this JSON object; None if it does not."""
    quiet = {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "NO", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        reply: dict[str, Any] = json.loads(asked("ladder.trial.count", seconds=_SECONDS, changes=quiet, told=question))
        return reply
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _file_of(question: str) -> Path:
    """Where the reply is kept. What is counted depends on the versions of these programs."""
    versions = " ".join((__version__, _REPLY, *map(version_of, COUNTED_BY)))
    return cache_folder() / "counted" / f"{hashlib.sha256(f'{versions} {question}'.encode()).hexdigest()[:24]}.json"


def _read(kept: Path) -> dict[str, Any] | None:
    try:
        reply: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return reply
    except (OSError, ValueError):
        return None
