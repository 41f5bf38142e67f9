"""Looks at scripts and trials of them, one after another, in one server's life and without a whole tune."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from helpers.scripts import SCRIPTS, files_in
from ladder.events.protocol import FailedEvent, MeasuredEvent
from ladder.events.step_policy import StepPolicy
from ladder.launch.base import Deadlines
from ladder.launch.local import LocalLauncher
from ladder.machine.described import Machine
from ladder.machine.machine import detect_machine
from ladder.options.tune import TuneOptions
from ladder.techniques.keys import candidate_of
from ladder.tuning.own_script import script_spec, workload_of_script
from ladder.tuning.script_look import look_at
from ladder.tuning.trial_request import candidate_spec, engine_config, proof_steps, trial_spec
from ladder.workload.script import Script
from ladder.workload.workload import Workload


@dataclass(frozen=True)
class Rehearsed:
    """What came of a trial."""

    folder: Path
    measured: int
    """Ranks that measured it."""
    said: str
    """Of the first rank that failed; empty if none did."""
    moment: str | None
    traceback: str
    made: frozenset[str]
    """Files that are there since."""

    @property
    def log(self) -> str:
        return "".join(file.read_text(errors="replace") for file in sorted(self.folder.glob("rank*.log")))


class Rehearsals:
    """Of scripts in `home`, on two CPU ranks."""

    def __init__(self, home: Path, run_dir: Path, launcher: LocalLauncher) -> None:
        self.home, self._run_dir, self._launcher = home, run_dir, launcher
        self._machine: Machine = detect_machine(gpus=0, gpu_memory=3 << 30, host_memory=None, nvme_path=None)
        self._number = 0

    def look(self, *command: str) -> Script:
        """UsageError, with its sentence, for a script that cannot be tuned."""

        @contextmanager
        def launching(*_: Any) -> Iterator[LocalLauncher]:
            yield self._launcher

        return look_at(command, self._machine, lambda said: None, launching)

    def workload(self, script: Script) -> Workload:
        return workload_of_script(script, TuneOptions(), self._machine, lambda said: None)

    def trial(
        self, *command: str, key: str = "zero2 ckpt=off mb=4", proof: bool = False, seconds: float = 0.5
    ) -> Rehearsed:
        """Of the candidate `key`, after a look."""
        before = files_in(self.home)
        workload = self.workload(self.look(*command))
        candidate = candidate_of(key, workload.global_batch_size, self._machine.world_size)
        self._number += 1
        folder = self._run_dir / f"{self._number:04}"
        config = engine_config(workload, [candidate], self._machine.world_size, None, proving=proof)
        steps: dict[str, Any] = proof_steps(workload) if proof else {}
        spec = trial_spec(
            folder.name,
            folder,
            workload,
            self._machine,
            candidate.engine,
            config,
            [candidate_spec(candidate)],
            steps=replace(StepPolicy(), **(steps | {"seconds": seconds})),
            proof=proof,
            script=script_spec(workload, candidate, self._machine, config, folder),
        )
        run = self._launcher.run(spec, Deadlines(), lambda *_: None)
        events = [event for of_rank in run.events for event in of_rank]
        failed = [each for each in events if isinstance(each, FailedEvent) and not each.consequence]
        first = min(failed, key=lambda each: each.t, default=None)
        stopped = run.stop.sentence if run.stop is not None else ""
        return Rehearsed(
            folder=folder,
            measured=sum(isinstance(event, MeasuredEvent) for event in events),
            said=first.message if first is not None else stopped,
            moment=first.moment if first is not None else None,
            traceback=first.traceback if first is not None else "",
            made=frozenset(name for name, digest in files_in(self.home).items() if before.get(name) != digest),
        )


@contextmanager
def rehearsals(home: Path, run_dir: Path, environment: Mapping[str, str]) -> Iterator[Rehearsals]:
    """In `home`, which is the working folder meanwhile; trials are written below `run_dir`."""
    run_dir.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)  # before the server starts, which stays where it is
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # a script's own modules are the user's files
        launcher = LocalLauncher(
            marker=f"ladder-test-{secrets.token_hex(8)}",
            job={
                "model_config": None,
                "task": "",
                "preload": ["ladder.trial.script.running"],
                "operators": ["shm_comm"],
            },
            environment=environment,
            log=run_dir / "server.log",
        )
        with closing(launcher):
            yield Rehearsals(home, run_dir, launcher)


@contextmanager
def rehearsals_of_held(folder: Path, environment: Mapping[str, str]) -> Iterator[Rehearsals]:
    """Of the scripts of tests/scripts/held, in a copy of theirs in `folder`."""
    shutil.copytree(SCRIPTS / "held", folder / "home", ignore=shutil.ignore_patterns("__pycache__"))
    with rehearsals(folder / "home", folder / "trials", environment) as held:
        yield held
