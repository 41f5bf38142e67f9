"""A look at the user's own script: it runs up to the beginning of its training, and reports what it has."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from ladder.errors import EnvironmentFaultError, UsageError
from ladder.events.protection import Level
from ladder.events.protocol import RUN_MARKER, FailedEvent, LookedEvent, ProtectedEvent, ScriptSpec, TrialSpec
from ladder.events.trial_run import TrialRun
from ladder.launch.base import Deadlines, Launcher
from ladder.launch.local import LocalLauncher
from ladder.launch.protecting import WORDS, protection_here
from ladder.launch.rank_environment import script_environment
from ladder.launch.sweep import run_marker
from ladder.machine.described import Machine
from ladder.machine.lease import InterruptedWaitError
from ladder.techniques.registry import TECHNIQUES
from ladder.text import shown
from ladder.workload.script import Script, ScriptFacts

_PREPARATION_SECONDS = 3600.0
"""Of a script before it trains. Chosen: a large data set is tokenised in less, and a script that waits for what never
comes must end."""
_LOOK = "ladder-look-"
_KERNELS = tuple(name for each in TECHNIQUES.values() if each.replaces_kernels for name in each.trainer_arguments())
"""Arguments of the Trainer that change its kernels."""
Launching = Callable[[Path, str, Mapping[str, Any], Mapping[str, str]], AbstractContextManager[Launcher]]
"""From a folder, a marker, a server's job and its environment to a launcher of one rank."""


def look_at(
    command: Sequence[str],
    machine: Machine,
    note: Callable[[str], None],
    launching: Launching,
    place: Path | None = None,
) -> Script:
    """Run the script up to the moment at which it would begin to train, in one process, and report what it has.

    `place` is where the look has its folder; None is this host's for temporary files. UsageError, in one sentence, for
    a script that cannot be taken hold of.
    """
    note(f"Looking at {shown(' '.join(command))}: it runs up to the beginning of its training.")
    expected = protection_here().level
    note(WORDS[expected])
    with tempfile.TemporaryDirectory(prefix=_LOOK, dir=place, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        marker = run_marker(folder)
        job = {"model_config": None, "task": "", "preload": ["ladder.trial.script.running"], "operators": []}
        environment = {**script_environment(machine), RUN_MARKER: marker}
        with launching(folder, marker, job, environment) as launcher:
            deadlines = Deadlines(model=_PREPARATION_SECONDS, total=_PREPARATION_SECONDS)
            run = launcher.run(_look(command, machine, folder), deadlines, lambda *_: None)
        if (seen := _protection_in(run)) not in (None, expected):  # on another host
            note(WORDS[seen])
        return Script(command=tuple(command), facts=_facts(run, folder / "look" / "rank0.log"))


def look_here(
    command: Sequence[str], machine: Machine, note: Callable[[str], None], cancelled: Callable[[], bool]
) -> Script:
    """`look_at` on this host."""

    def launching(
        folder: Path, marker: str, job: Mapping[str, Any], environment: Mapping[str, str]
    ) -> AbstractContextManager[Launcher]:
        log = folder / "server.log"
        return closing(LocalLauncher(marker=marker, job=job, environment=environment, log=log, cancelled=cancelled))

    return look_at(command, machine, note, launching)


def _look(command: Sequence[str], machine: Machine, folder: Path) -> TrialSpec:
    return TrialSpec(
        trial="look",
        folder=str(folder / "look"),
        device=machine.device,
        world_size=1,
        gpu_uuids=tuple(gpu.uuid for gpu in machine.gpus[:1]),
        model_config_json={},
        task="causal-lm",
        seq_len=1,
        optimizer="adamw",
        dtype="bf16",
        deepspeed={"zero_optimization": {"stage": 0}},
        # One process looks, and the script has to count with all ranks: it may divide its batch among them.
        environment={
            "WORLD_SIZE": str(machine.world_size),
            "LOCAL_WORLD_SIZE": str(machine.world_size // machine.num_nodes),
        },
        candidates=(),
        memory_limit=machine.memory_limit,
        script=ScriptSpec(
            command=tuple(command),
            mode="look",
            scratch=str(folder / "scratch"),
            kernels=_KERNELS,
        ),
    )


def _protection_in(run: TrialRun) -> Level | None:
    return next((each.level for events in run.events for each in events if isinstance(each, ProtectedEvent)), None)


def _facts(run: TrialRun, log: Path) -> ScriptFacts:
    if run.stop is not None and run.stop.kind == "cancelled":
        raise InterruptedWaitError("The look at the script was interrupted.")
    events = run.events[0] if run.events else []
    for event in events:
        if isinstance(event, LookedEvent):
            return event.facts
    for event in events:
        if isinstance(event, FailedEvent):
            # A UsageError is about the command: nothing was started.
            where = "" if event.message.startswith("UsageError: ") else _kept(log)
            raise UsageError(f"The script cannot be tuned: {_in_words(event.message)}{where}.")
    if run.stop is not None and run.stop.kind == "environment":
        raise EnvironmentFaultError(run.stop.sentence)
    why = run.stop.sentence if run.stop is not None else "its process ended"
    raise UsageError(f"The script cannot be tuned: it did not come to its training, {why}{_kept(log)}.")


def _kept(log: Path) -> str:
    """Words for where the script's output is from now on: all else of the look goes."""
    if not log.is_file():
        return ""
    descriptor, name = tempfile.mkstemp(prefix=_LOOK, suffix=".log")
    os.close(descriptor)
    shutil.copyfile(log, name)
    return f" (its output is in {name})"


def _in_words(message: str) -> str:
    """The first line, without the type of an error about the command."""
    return shown(message.removeprefix("UsageError: ").rstrip(".").partition("\n")[0])
