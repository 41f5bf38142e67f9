"""`ladder run`: the user's own training with the settings of an answer, and what to do when its memory runs out."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladder.backends.registry import backend_of
from ladder.emit.config import SECTION, candidate_key_in, load_best_config
from ladder.emit.nodes import PORT
from ladder.emit.settings import settings_in
from ladder.errors import EnvironmentFaultError, FewerStepsThanPlannedError, UsageError
from ladder.events.as_json import to_json
from ladder.events.memory_limit import for_torch
from ladder.events.outcome import MEMORY_OUTCOMES
from ladder.events.protocol import CheckpointEvent, FailedEvent, ScriptSpec, TrainedEvent, TrialSpec, parse_event
from ladder.launch.modules import training_environment
from ladder.machine.environment import ranks_in
from ladder.machine.gpus import visible_gpus
from ladder.machine.interpreter import is_own, ranks_python
from ladder.options.answer import RunOptions
from ladder.techniques.keys import candidate_of
from ladder.tuning.step_down import RunPlan, smaller
from ladder.tuning.trial_request import candidate_spec, rank_modules_of
from ladder.tuning.tune_events import Note, Subscriber
from ladder.units import GIB, format_bytes
from ladder.workload.script import OwnTraining, told


@dataclass(frozen=True, kw_only=True)
class _End:
    """How a training ended."""

    status: int
    failure: FailedEvent | None = None
    """Of the first rank to fail."""
    has_checkpoint: bool = False
    """It wrote or read one."""
    written: str = ""
    """The folder of a Trainer's last one that it wrote."""
    trained: tuple[TrainedEvent, ...] = ()
    """Of all its ranks."""


_STEPS_DOWN = MEMORY_OUTCOMES - {"disk_full"}
"""No candidate takes less of a full disk."""


def run_script(path: Path, asked: RunOptions, tell: Subscriber) -> int:
    """Train with the answer in `path` until the script ends; returns its exit status.

    FewerStepsThanPlannedError for a training that lost steps,
    UsageError without a script, EnvironmentFaultError where there are too few GPUs.
    """
    document = load_best_config(path)
    section = document[SECTION]
    command = asked.script or tuple(section.get("script", {}).get("command", ()))
    if not command:
        raise UsageError(f"{str(path)!r} was not tuned for a script; name yours: ladder run {path} -- train.py …")
    with ranks_in(asked.python, command) as environment:
        if not is_own():
            tell(Note(environment))
        return _run_to_its_end(_first_plan(document, path, command, asked), section, command, asked, tell)


def _run_to_its_end(
    plan: RunPlan, section: Mapping[str, Any], command: Sequence[str], asked: RunOptions, tell: Subscriber
) -> int:
    if plan.memory_limit:
        whose = " of its GPU" if plan.settings.device == "cuda" else ""
        size = format_bytes(plan.memory_limit)
        tell(Note(f"Each rank may use {size}{whose}, as in the tune; --no-memory-limit lifts this limit."))
    has_checkpoint, tried = False, {plan.candidate.key}
    while True:
        end = _trained(command, plan)
        has_checkpoint = has_checkpoint or end.has_checkpoint
        if end.status == 0:
            require_trained(end.trained, plan, tell)
        if end.status == 0 or end.failure is None or end.failure.outcome not in _STEPS_DOWN:
            return end.status
        said = f"It ran out of memory on a rank, in {end.failure.moment} ({plan.candidate.key})."
        less = smaller(Path(section["run_dir"]), plan, tried, has_checkpoint, end.failure.outcome)
        if less is None:
            reads = " and can read its checkpoint" if has_checkpoint else ""
            tell(Note(f"{said} No measured candidate takes less{reads}; {_other_help(plan, end.failure.outcome)}."))
            return end.status
        held = f"{less.candidate.key} was measured with less"
        start = "from the last checkpoint" if has_checkpoint else "from the beginning, as there is no checkpoint"
        if not asked.step_down:
            tell(Note(f"{said} {held}: --step-down goes on with it, {start}."))
            return end.status
        tell(Note(f"{said} {held}: going on with it {start}, with the same global batch."))
        plan = replace(less, resume=end.written or plan.resume)
        tried.add(less.candidate.key)


def _first_plan(document: Mapping[str, Any], path: Path, command: Sequence[str], asked: RunOptions) -> RunPlan:
    """How the answer in `document`, which was read from `path`, trains `command`. Raises as `run_script`."""
    section, settings = document[SECTION], settings_in(document)
    visible = len(visible_gpus()) if settings.device == "cuda" else settings.ranks_of_a_node
    if visible < (needed := settings.ranks_of_a_node):
        on_each = " on each node" if settings.num_nodes > 1 else ""
        raise EnvironmentFaultError(f"{str(path)!r} is for {needed} GPUs{on_each}, and {visible} are visible here.")
    if settings.num_nodes > 1:
        require_nodes(path, settings.num_nodes, asked)
    limit, of_torch = limits_in(section, asked)
    script = section.get("script", {})
    is_as_tuned = "planned" in script and list(command) == script["command"]
    return RunPlan(
        settings=settings,
        candidate=candidate_of(
            candidate_key_in(section), section["workload"]["global_batch_size"], settings.world_size
        ),
        config={key: value for key, value in document.items() if key != SECTION},
        options=script.get("options", {}),
        planned=OwnTraining(**script["planned"]) if is_as_tuned else None,
        memory_limit=limit,
        torch_limit=of_torch,
    )


def limits_in(section: Mapping[str, Any], asked: RunOptions) -> tuple[int, int]:
    """Bytes that each rank may use, and how many of them torch's allocator on a GPU; zeros where there is no limit."""
    memory = section["memory_per_gpu"]
    if not (asked.memory_limit and memory["limited"]):
        return 0, 0
    limit: int = memory["limit_bytes"]
    outside, reserved = (int(memory[name] * GIB) for name in ("outside_torch_gib", "peak_reserved_gib"))
    return limit, for_torch(limit, outside, reserved)


def _other_help(plan: RunPlan, outcome: str) -> str:
    """What helps a training whose memory ran out, if no other candidate does."""
    if plan.memory_limit and outcome == "gpu_oom":
        return "--no-memory-limit lets it take more than the tune's limit, if the device has more"
    return "tune again with a smaller --gpu-memory, and start that answer with --no-memory-limit"


def require_nodes(path: Path, num_nodes: int, asked: RunOptions) -> None:
    """UsageError for what this copy on one of several nodes lacks, or cannot do."""
    if asked.step_down:
        raise UsageError("--step-down is for one node: the copies on several cannot choose together; leave it out.")
    if "MASTER_ADDR" not in os.environ:
        raise UsageError(
            f"{str(path)!r} is for {num_nodes} nodes: start {path.with_suffix('.launch.sh')} on each of them, which "
            "names the first, or set MASTER_ADDR to its address."
        )


def meeting(num_nodes: int, ranks: int) -> list[str]:
    """Options of torchrun. On several nodes, the copies meet on the first."""
    if num_nodes == 1:
        return ["--standalone", "--nproc_per_node", str(ranks)]
    port, number = os.environ.get("MASTER_PORT", str(PORT)), os.environ.get("SLURM_JOB_ID", "ladder")
    meeting = ["--rdzv_backend", "c10d", "--rdzv_id", number, "--rdzv_endpoint", f"{os.environ['MASTER_ADDR']}:{port}"]
    return ["--nnodes", str(num_nodes), "--nproc_per_node", str(ranks), *meeting]


def _trained(command: Sequence[str], plan: RunPlan) -> _End:
    """A whole training."""
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
            optimizer=settings.optimizer or "adamw",
            dtype=settings.dtype,
            backend_module=backend_of(plan.candidate.engine.rung).rank_module,
            deepspeed=dict(plan.config),
            rank_modules=rank_modules_of(plan.candidate.engine),
            candidates=(candidate_spec(plan.candidate),),
            memory_limit=plan.memory_limit,
            script=ScriptSpec(
                command=told(command, plan.options, plan.candidate.micro_batch, plan.candidate.accumulation),
                told=tuple(plan.options),
                mode="run",
                arguments=plan.arguments,
                resume=plan.resume,
                torch_limit=plan.torch_limit,
                planned=plan.planned,
            ),
        )
        file = Path(folder) / "spec.json"
        file.write_text(to_json(spec), encoding="utf-8")
        ranks = meeting(settings.num_nodes, settings.ranks_of_a_node)
        status = _run(
            [ranks_python(), "-m", "torch.distributed.run", *ranks, "-m", "ladder.trial.script.start", str(file)],
            training_environment(settings.environment),
        )
        return _end(status, Path(folder))


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


def _end(status: int, folder: Path) -> _End:
    lines = [line for file in sorted(folder.glob("rank*.jsonl")) for line in file.read_bytes().splitlines()]
    events = [parse_event(line) for line in lines]
    failed = [event for event in events if isinstance(event, FailedEvent) and not event.consequence]
    checkpoints = [event for event in events if isinstance(event, CheckpointEvent)]
    written = [event for event in checkpoints if event.folder]
    last = max(written, key=lambda event: event.t, default=None)
    return _End(
        status=status,
        failure=min(failed, key=lambda event: event.t, default=None),
        has_checkpoint=bool(checkpoints),
        written=last.folder if last is not None else "",
        trained=tuple(event for event in events if isinstance(event, TrainedEvent)),
    )


def require_trained(trained: Sequence[TrainedEvent], plan: RunPlan, tell: Subscriber) -> None:
    """FewerStepsThanPlannedError, which says what is missing; a training that its own callback stopped is told."""
    for event in trained:
        if missing := _missing(event, plan):
            raise FewerStepsThanPlannedError(
                f"The training ended without an error, but {missing}; see in its output what ended it, or how its loop "
                "counts: options that set its batch are named by --map."
            )
    stopped = next((event for event in trained if event.is_stopped), None)
    if stopped is not None:
        steps = f"{stopped.optimizer_steps:,} of {stopped.planned_steps:,} optimizer steps"
        tell(Note(f"A callback of the script's own ended its training after {steps}."))


def _missing(event: TrainedEvent, plan: RunPlan) -> str:
    """In words; empty where nothing is."""
    candidate, planned, ranks = plan.candidate, plan.planned, plan.settings.world_size
    made, total = event.optimizer_steps, event.planned_steps
    if total is not None and made < total and not event.is_stopped:
        return f"after {made:,} of {total:,} optimizer steps"
    is_as_it_was = planned is not None and (planned.micro_batch, planned.accumulation) == (
        candidate.micro_batch,
        candidate.accumulation,
    )
    # Its owner may want a schedule longer than the training, or compute it before the ranks share the data. So only a
    # loop that does not know how it is batched is asked. accelerate steps it once for each rank.
    knows_its_batch = is_as_it_was or {"micro_batch", "accumulation"} <= plan.options.keys()
    length, at = event.schedule_steps or 0, event.schedule_at
    if at is not None and length - at > ranks and not knows_its_batch:
        return f"after {made:,} optimizer steps, its learning rate's schedule at {at:,} of {length:,} steps"
    batch = candidate.sequences(ranks)
    if planned is None or (planned.samples or batch) < batch:
        return ""
    if event.accumulation < candidate.accumulation:
        each = f"{event.accumulation:,} micro-steps in each where the answer has {candidate.accumulation:,}"
        return f"its {made:,} optimizer steps had at most {each}"
    return ""
