"""What several test modules need: workloads and records by hand, tiny real trials, a look at processes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ladder.backends.deepspeed.config import deepspeed_config
from ladder.candidates import RUNGS_BY_NAME, Candidate, Engine, Problem, Rung, Technique
from ladder.events.outcome import Measurement, Outcome, OutcomeKind, Record
from ladder.events.protocol import RUN_MARKER, CandidateSpec, Event, StepPolicy, TrialSpec
from ladder.events.trial_run import TrialRun
from ladder.launch.base import Deadlines, Launcher, Listener
from ladder.machine.machine import Machine
from ladder.search.space import Space
from ladder.tuning.problem import make_space, problem_of, split_supported
from ladder.units import GIB
from ladder.workload.shapes import shape_from_config
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

TINY_CONFIG: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "tiny" / "config.json").read_text())
TINY = shape_from_config(TINY_CONFIG, name="tiny", source="file")
WORLD_SIZE = 2


def bundled_workload(model: str = "tiny-llama", **changes: Any) -> Workload:
    """A causal-lm workload on a bundled shape; `changes` are of the workload's own fields."""
    settings = {"task": "causal-lm", "seq_len": 64, "global_batch_size": 8} | changes
    return Workload(model=resolve_model(model), **settings)


def make_candidate(
    rung: str = "zero2", *, checkpointing: bool = True, micro_batch: int = 1, accumulation: int = 4
) -> Candidate:
    return Candidate(Engine(RUNGS_BY_NAME[rung]), checkpointing, micro_batch, accumulation)


def make_measurement(**changes: Any) -> Measurement:
    settings = {
        "accumulate_seconds": 1.0,
        "boundary_seconds": 2.0,
        "spread": 0.01,
        "num_steps": 3,
        "peak_allocated": 2 * GIB,
        "peak_reserved": 3 * GIB,
        "peak_device": 4 * GIB,
        "outside_torch": GIB,
        "peak_host": 5 * GIB,
    }
    return Measurement(**settings | changes)


def make_record(
    candidate: Candidate, kind: OutcomeKind = "fits", *, tokens_per_second: float = 100.0, **changes: Any
) -> Record:
    """A record with a measurement where it fits, and with the given outcome where it does not."""
    fits = kind == "fits"
    settings = {
        "candidate_key": candidate.key,
        "trial": "0001",
        "purpose": "measure",
        "outcome": Outcome(kind=kind, sentence="" if fits else f"ended in {kind}", moment=None if fits else "forward"),
        "measurement": make_measurement() if fits else None,
        "tokens_per_second": tokens_per_second if fits else None,
    }
    return Record(**settings | changes)


def as_a_rank_sees(candidate: Candidate) -> CandidateSpec:
    names = ("key", "checkpoint_every", "micro_batch", "accumulation", "offload_activations")
    return CandidateSpec(**{name: getattr(candidate, name) for name in names})


def tiny_trial(
    folder: Path, *micro_batches: int, rung: str = "zero2", memory_limit: int = GIB, **changes: Any
) -> TrialSpec:
    """A real trial of a two-layer Llama on two CPU ranks, one candidate for each micro-batch."""
    accumulation = 2
    workload = Workload(
        model=TINY,
        task="causal-lm",
        seq_len=64,
        global_batch_size=WORLD_SIZE * accumulation,
    )
    candidates = [make_candidate(rung, micro_batch=size, accumulation=accumulation) for size in micro_batches]
    config = deepspeed_config(
        workload,
        candidates[0].engine,
        micro_batch=micro_batches[0],
        accumulation=accumulation,
        world_size=WORLD_SIZE,
        nvme_path=None,
    )
    return TrialSpec(
        trial=folder.name,
        folder=str(folder),
        device="cpu",
        world_size=WORLD_SIZE,
        model_config_json=TINY_CONFIG,
        task="causal-lm",
        seq_len=workload.seq_len,
        optimizer="adamw",
        dtype="bf16",
        deepspeed=config,
        candidates=tuple(map(as_a_rank_sees, candidates)),
        memory_limit=memory_limit,
        **{"steps": StepPolicy(maximum=3, seconds=0.2)} | changes,
    )


@dataclass
class Finished:
    """A command that ended, and what was seen of it."""

    status: int
    output: str
    errors: str
    num_marked: int
    """The most processes that carried the run's marker at once."""
    num_left: int
    """Descendants that outlived it."""


def ladder(*arguments: str, folder: Path) -> Finished:
    """Run the command line in `folder`. Its descendants are known by a variable that they inherit."""
    variable, value = "LADDER_TEST_MARKER", secrets.token_hex(8)
    with (folder / "stdout.txt").open("w") as output, (folder / "stderr.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "ladder.cli.main", *arguments],
            cwd=folder,
            env={**os.environ, variable: value, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
    num_marked = 0
    while process.poll() is None:
        num_marked = max(num_marked, sum(RUN_MARKER in _environment(each) for each in processes_with(variable, value)))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
    left = processes_with(variable, value)
    for survivor in left:
        survivor.kill()
    said = [(folder / name).read_text() for name in ("stdout.txt", "stderr.txt")]
    return Finished(process.returncode, *said, num_marked, len(left))


# A real tune of few and short steps that still meets all there is: a rung that runs out of memory while it builds its
# engine, one that fits, losses compared, a proof. zero0's engine needs 425 MiB, and zero2 never more than 400: the
# shorter the sequences, the less comes on top.
SMALL_TUNE = ["tune", "tiny-llama", "--gpus", "0", "--gpu-memory", "390MiB", "--seq-len", "16"]
SMALL_TUNE += ["--global-batch-size", "4", "--micro-batch", "1", "--rung", "zero0", "--rung", "zero2"]
SMALL_TUNE += ["--strategy", "exhaustive", "--run-dir", "ladder-runs/small"]


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """The living processes that have had `variable`=`value` in their environment from their start."""
    return [process for process in psutil.process_iter() if _environment(process).get(variable) == value]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return {} if process.status() == psutil.STATUS_ZOMBIE else process.environ()
    except (psutil.Error, OSError):
        return {}


def _parent(process: psutil.Process) -> psutil.Process | None:
    """None for a process that has ended since it was listed."""
    try:
        return process.parent()
    except psutil.NoSuchProcess:
        return None


@dataclass
class Bench:
    """A launcher on the test bench: it can be cancelled, and what it keeps running can be counted."""

    launcher: Launcher
    cancellation: list[bool]
    marker: str
    events: list[tuple[int, Event]] = field(default_factory=list)
    has_processes: bool = True
    """Whether its ranks are processes of this host."""

    def run(
        self, spec: TrialSpec, also: Listener = lambda rank, event: None, deadlines: Deadlines | None = None
    ) -> TrialRun:
        self.events.clear()
        self.cancellation.clear()

        def listen(rank: int, event: Event) -> None:
            self.events.append((rank, event))
            also(rank, event)

        return self.launcher.run(spec, deadlines or Deadlines(), listen)

    def cancel(self) -> None:
        self.cancellation.append(True)

    def processes(self) -> list[psutil.Process]:
        """Everything alive that the launcher started."""
        return processes_with(RUN_MARKER, self.marker)

    def ranks(self) -> list[psutil.Process]:
        """Those of them that belong to a trial: all but the server that a warm launcher keeps."""
        return [process for process in self.processes() if _parent(process) not in (None, psutil.Process())]

    def server(self) -> psutil.Process:
        """The trial server of a local launcher."""
        (server,) = [process for process in self.processes() if _parent(process) == psutil.Process()]
        return server

    def rank(self, rank: int) -> psutil.Process:
        """One rank of the trial that runs: they are forked in order."""
        return sorted(self.server().children(), key=lambda process: (process.create_time(), process.pid))[rank]


def is_alive(process: psutil.Process) -> bool:
    """A zombie that init has not reaped yet is not: it holds nothing."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def problem_for(workload: Workload, world_size: int = 1, device: str = "cuda", **changes: Any) -> Problem:
    """`workload` on a machine with plenty of memory."""
    facts = {"memory_limit": 1 << 50, "host_memory": 1 << 50, **changes}
    return Problem(workload=workload, world_size=world_size, device=device, **facts)


def space_on(
    workload: Workload,
    machine: Machine,
    rungs: Sequence[Rung],
    micro_batches: Sequence[int],
    *,
    techniques: Sequence[Technique] = (),
    checkpointing: Sequence[str] = (),
) -> tuple[Space, dict[Rung, str]]:
    """The space of a tune on `machine`, and the rungs that it does not support with the reason."""
    supported, unsupported = split_supported(rungs, machine)
    problem = problem_of(workload, machine)
    return make_space(
        problem, supported, micro_batches, techniques=techniques, checkpointing=checkpointing
    ), unsupported
