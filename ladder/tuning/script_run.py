"""`ladder run`: the user's own training with the settings of an answer, and what to do when its memory runs out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladder.backends.registry import backend_of
from ladder.candidates import Candidate
from ladder.emit.config import SECTION, candidate_key_in, load_best_config
from ladder.emit.settings import Settings, settings_in
from ladder.emit.trainer import trainer_arguments
from ladder.errors import EnvironmentFaultError, LadderError, UsageError
from ladder.events.outcome import MEMORY_OUTCOMES
from ladder.events.protocol import FailedEvent, ScriptSpec, TrialSpec, parse_event
from ladder.machine.gpus import visible_gpus
from ladder.search.space import Space, measured
from ladder.techniques.keys import candidate_of
from ladder.tuning.options import RunOptions
from ladder.tuning.stored import stored_output
from ladder.tuning.trial_request import candidate_spec
from ladder.tuning.tune_events import Note, Subscriber
from ladder.workload.script import keeps_its_optimizer

_LESS = 0.95
"""A candidate to step down to holds at most this share of the memory. Chosen: more than measurements of one stray."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """How the ranks train."""

    settings: Settings
    candidate: Candidate
    config: Mapping[str, Any]
    optimizer: str = ""
    """Of the script's own, as transformers names it."""
    resume: bool = False


def run_script(path: Path, asked: RunOptions, tell: Subscriber) -> int:
    """Train with the answer in `path` until the script ends; returns its exit status.

    UsageError without a script, EnvironmentFaultError where there are too few GPUs.
    """
    document = load_best_config(path)
    section = document[SECTION]
    command = asked.script or tuple(section.get("script", {}).get("command", ()))
    if not command:
        raise UsageError(f"{str(path)!r} was not tuned for a script; name yours: ladder run {path} -- train.py …")
    settings = settings_in(document)
    visible = len(visible_gpus()) if settings.device == "cuda" else settings.world_size
    if visible < settings.world_size:
        raise EnvironmentFaultError(f"{str(path)!r} is for {settings.world_size} GPUs, and {visible} are visible here.")
    candidate = candidate_of(candidate_key_in(section), section["workload"]["global_batch_size"], settings.world_size)
    config = {key: value for key, value in document.items() if key != SECTION}
    own = section.get("script", {}).get("optimizer", "")
    plan, tried = _Plan(settings=settings, candidate=candidate, config=config, optimizer=own), {candidate.key}
    while True:
        status, failure = _trained(command, plan)
        if status == 0 or failure is None or failure.outcome not in MEMORY_OUTCOMES:
            return status
        said = f"It ran out of memory on a rank, in {failure.moment} ({plan.candidate.key})."
        smaller = _smaller(section, plan, tried)
        if smaller is None:
            tell(Note(f"{said} No measured candidate of the same stage takes less; tune again with --gpu-memory."))
            return status
        held = f"{smaller.candidate.key} was measured with less"
        if not asked.step_down:
            tell(Note(f"{said} {held}: --step-down goes on with it from the script's last checkpoint."))
            return status
        tell(Note(f"{said} {held}: going on with it from the last checkpoint, with the same global batch."))
        plan = smaller
        tried.add(smaller.candidate.key)


def _trained(command: Sequence[str], plan: _Plan) -> tuple[int, FailedEvent | None]:
    """The exit status of a training, and what its first rank to fail said."""
    settings = plan.settings
    with tempfile.TemporaryDirectory(prefix="ladder-run-") as folder:
        spec = TrialSpec(
            trial="run",
            folder=folder,
            device=settings.device,
            world_size=settings.world_size,
            model_config_json={},
            task="causal-lm",
            seq_len=settings.seq_len,
            optimizer=settings.optimizer,
            dtype=settings.dtype,
            deepspeed=dict(plan.config),
            candidates=(candidate_spec(plan.candidate),),
            memory_limit=0,
            script=ScriptSpec(
                command=tuple(command),
                mode="run",
                arguments=_arguments(plan),
                resume=plan.resume,
            ),
        )
        file = Path(folder) / "spec.json"
        file.write_text(spec.model_dump_json(), encoding="utf-8")
        ranks = ["--standalone", "--nproc_per_node", str(settings.world_size)]
        status = _run(
            [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", "ladder.trial.script.start", str(file)],
            {**os.environ, **settings.environment},
        )
        return status, _failure(Path(folder))


def _arguments(plan: _Plan) -> dict[str, Any]:
    arguments = trainer_arguments(plan.settings, Path("deepspeed.json")) | {"deepspeed": dict(plan.config)}
    if plan.optimizer and keeps_its_optimizer(plan.optimizer):
        arguments.pop("optim", None)
    return arguments


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit status of `command`, to which the signals that ask us to end are passed on."""
    process = subprocess.Popen(command, env=dict(environment))
    with _passing_on(process):
        return process.wait()


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    def passed_on(number: int, _: Any) -> None:
        process.send_signal(number)

    # Ctrl-C reaches the training by itself, through the terminal: it ends in its own way, and we wait for that.
    before = {number: signal.signal(number, passed_on) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failure(folder: Path) -> FailedEvent | None:
    lines = [line for file in sorted(folder.glob("rank*.jsonl")) for line in file.read_bytes().splitlines()]
    failed = [event for event in map(parse_event, lines) if isinstance(event, FailedEvent) and not event.consequence]
    return min(failed, key=lambda event: event.t, default=None)


def _smaller(section: Mapping[str, Any], plan: _Plan, tried: set[str]) -> _Plan | None:
    """The fastest measured candidate that takes less, of the same stage: others cannot read the checkpoint."""
    try:
        stored = stored_output(Path(section["run_dir"]))
    except LadderError:  # the run folder is gone
        return None
    space: Space = stored.result.space
    records = measured(stored.result.records)
    now = records.get(plan.candidate.key)
    if now is None or now.measurement is None:
        return None
    limit = _LESS * now.measurement.peak_device
    stage = plan.candidate.engine.rung.stage
    found = [
        space.by_key[key]
        for key, record in records.items()
        if key not in tried
        and key in space.by_key
        and record.measurement is not None
        and record.tokens_per_second
        and record.measurement.peak_device <= limit
        and space.by_key[key].engine.rung.stage == stage
    ]
    if not found:
        return None
    best = max(found, key=lambda candidate: records[candidate.key].tokens_per_second or 0.0)
    return _with(plan, best, space)


def _with(plan: _Plan, candidate: Candidate, space: Space) -> _Plan:
    nvme = Path(space.nvme_path) if space.nvme_path else None
    config = backend_of(candidate.engine.rung).configuration(
        space.workload,
        candidate.engine,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        world_size=plan.settings.world_size,
        nvme_path=nvme,
    )
    settings = replace(
        plan.settings,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        checkpoint_every=candidate.checkpoint_every,
        checkpointing=candidate.checkpointing,
        techniques=candidate.engine.techniques,
    )
    return replace(plan, settings=settings, candidate=candidate, config=config, resume=True)
