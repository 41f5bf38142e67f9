"""`ladder verify`: runs the proof of a best_config.json again, and compares it with what the file promises."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladder.candidates import Candidate
from ladder.emit.config import SECTION, candidate_key_in, load_best_config, original_text
from ladder.errors import EnvironmentFaultError, NothingFitsError, UsageError
from ladder.events.outcome import Record
from ladder.events.protocol import TrialSpec
from ladder.events.step_policy import StepPolicy
from ladder.events.verdict import false_start, judge, trial_seconds
from ladder.launch.base import Launcher
from ladder.machine.described import Machine
from ladder.machine.environment import ranks_in
from ladder.machine.gpus import allocator_in, visible_gpus
from ladder.machine.interpreter import is_own
from ladder.machine.lease import Leases
from ladder.options.answer import VerifyOptions
from ladder.options.declaring import checked
from ladder.options.technique_choices import require_adapters, require_usable
from ladder.options.tune import TuneOptions
from ladder.runs.history import make_private
from ladder.search.cost import PROOF_SECONDS, PROOF_STEPS
from ladder.techniques.keys import candidate_of
from ladder.text import shown
from ladder.tuning.interruption import InterruptedVerificationError
from ladder.tuning.own_script import script_spec, with_preparation
from ladder.tuning.prepared import introduced
from ladder.tuning.trial_request import (
    candidate_spec,
    fewest_micro_steps,
    proof_steps,
    trial_deadlines,
    trial_spec,
)
from ladder.tuning.tune_events import Note, Subscriber, TrialBegins, TrialEnds, hearing, ignore, noting
from ladder.tuning.venues import venue_of
from ladder.tuning.verified import Verification
from ladder.units import GIB
from ladder.workload.lora import Lora
from ladder.workload.script import OwnTraining, ScriptFacts
from ladder.workload.workload import Workload

_LONGEST_SECONDS = 7 * 24 * 3600.0
"""The time limit if a number of steps is given. Chosen: a week, which no verification takes."""
_TRIAL = "0001"


def run_verification(
    path: Path,
    asked: VerifyOptions,
    tell: Subscriber = ignore,
    cancelled: Callable[[], bool] = lambda: False,
) -> Verification:
    """Train with the configuration in `path` in fresh processes, run an evaluation pass and gather the weights.

    `asked` gives the number of optimizer steps or the minutes, and these steps are whole. By default, there are as many
    as a proof has, with as few micro-steps.
    UsageError for invalid options, and for a file that was edited, that is simulated, or that needs another number of
    ranks than there are here.
    """
    asked = _sensible(asked)
    document = _measured_document(path)
    promise = document[SECTION]
    options = _options(promise, document, asked)
    with (
        ranks_in(asked.python, options.script) as environment,
        Leases(note=noting(tell), cancelled=cancelled) as leases,
        closing(venue_of(options, leases, tell, cancelled)) as host,
    ):
        if not is_own():
            tell(Note(environment))
        workload, machine = introduced(options, host, tell)
        require_adapters(workload)
        _compare(path, promise, workload, machine, tell)
        machine = as_it_was_measured(machine, promise["environment"])
        candidate = _candidate(promise, workload, machine)
        for technique in candidate.engine.techniques:
            require_usable(technique, workload, machine.device)
        run_dir = Path("ladder-runs") / f"verify-{promise['digest']}"
        make_private(run_dir)
        leases.name_run(run_dir)
        rungs = [candidate.engine.rung]
        with _alone_in(run_dir, path), host.opened(machine, workload, rungs, run_dir) as venue:
            if (reason := venue.machine.unsupported.get(rungs[0].name)) is not None:
                raise NothingFitsError(f"{rungs[0].name} no longer works on this machine: {reason}.")
            is_whole = workload.script is not None or asked.steps is not None or asked.minutes is not None
            accumulation = candidate.accumulation if is_whole else fewest_micro_steps([candidate])
            config = _config(document, candidate, accumulation, venue.machine, venue.swap_prefix)
            spec = _spec(config, candidate, workload, venue.machine, run_dir, _steps(asked, workload))
            record, seconds = _prove(spec, candidate, workload, venue.launcher, tell)
    done = _verification(path, promise, candidate, machine, asked.tolerance, record, seconds)
    done = replace(done, has_script=workload.script is not None)
    if done.caches_more:
        tell(Note(f"Warning: {done.caches_more}."))
    return done


def _verification(
    path: Path,
    promise: Mapping[str, Any],
    candidate: Candidate,
    machine: Machine,
    tolerance: float,
    record: Record,
    seconds: float,
) -> Verification:
    """What was seen, beside what the file promises."""
    memory = {name: int(gib * GIB) for name, gib in promise["memory_per_gpu"].items() if name.endswith("_gib")}
    most = promise.get("script", {}).get("promised_device_gib")
    speeds = promise["tokens_per_second_range"]
    return Verification(
        path=path,
        candidate_key=candidate.key,
        record=record,
        promised_tokens_per_second=promise["tokens_per_second"],
        promised_range=(speeds[0], speeds[1]) if speeds else None,
        promised_device_bytes=int(most * GIB) if most is not None else memory["peak_device_gib"],
        promised_allocated_bytes=memory["peak_allocated_gib"],
        promised_reserved_bytes=memory["peak_reserved_gib"],
        memory_limit=machine.memory_limit,
        device=machine.device,
        tolerance=tolerance,
        seconds=seconds,
    )


def _compare(path: Path, promise: Mapping[str, Any], workload: Workload, machine: Machine, tell: Subscriber) -> None:
    """UsageError for another number of ranks than the file's; other differences are told."""
    if machine.world_size != promise["world_size"]:
        raise UsageError(
            f"{str(path)!r} is for {promise['world_size']} ranks, but this machine has {machine.world_size}."
        )
    if machine.gpu_name != promise["gpu"]:
        tell(Note(f"Warning: it was measured on {promise['gpu']}, but this machine has {machine.gpu_name}."))
    if workload.script is not None:
        facts, promised = workload.script.facts, promise.get("script", {})
        _compare_script(path, promised, facts, tell)
        planned = facts.planned(workload.global_batch_size, machine.world_size)
        _compare_planned(promised.get("planned", {}), planned, tell)


def _compare_script(path: Path, promise: Mapping[str, Any], facts: ScriptFacts, tell: Subscriber) -> None:
    """UsageError for another optimizer than the file's, which holds other states."""
    if facts.digest != promise.get("sha256"):
        tell(Note("Warning: the script has changed since it was tuned."))
    if "optimizer" in promise and facts.optimizer != promise["optimizer"]:
        raise UsageError(
            f"{str(path)!r} was tuned for the optimizer {shown(promise['optimizer'])}, but the script trains with "
            f"{shown(facts.optimizer)}; tune it again."
        )


def _compare_planned(promised: Mapping[str, Any], planned: OwnTraining | None, tell: Subscriber) -> None:
    """A warning where the script makes other steps by itself than it did."""
    for name, before in promised.items():
        now = getattr(planned, name, before)
        if now != before:
            tell(Note(f"Warning: {name.replace('_', ' ')} of the script's own: {now}, and {before} when it was tuned."))


def as_it_was_measured(machine: Machine, environment: Mapping[str, str]) -> Machine:
    """`machine` with the allocator settings and the threads per rank from the file's environment."""
    threads = int(environment["OMP_NUM_THREADS"])
    return replace(machine, allocator=allocator_in(environment), num_cores=threads * machine.world_size)


def _measured_document(path: Path) -> dict[str, Any]:
    document = load_best_config(path)
    if document[SECTION]["proof"].get("simulated"):
        # Simulated figures were never measured, so comparing with them would say nothing about this machine.
        raise UsageError(
            f"{str(path)!r} is a simulated answer: its figures were never measured, so there is nothing to verify; "
            "run `ladder tune` on the machine itself."
        )
    return document


def _sensible(asked: VerifyOptions) -> VerifyOptions:
    if asked.steps is not None and asked.minutes is not None:
        raise UsageError("steps and minutes both say how long to train; give only one of them.")
    return checked(asked)


@contextmanager
def _alone_in(run_dir: Path, path: Path) -> Iterator[None]:
    """Lock `run_dir`. While it is locked, processes of this run must be left over from an earlier verification.

    EnvironmentFaultError if another verification of `path` holds the lock, or if the file system has no locks.
    """
    with ExitStack() as held:
        try:
            lock = held.enter_context((run_dir / "lock").open("a+b", buffering=0))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock.fileno(), 32, 0).decode(errors="replace")
            raise EnvironmentFaultError(
                f"Another verification of {str(path)!r} is running (pid {holder or 'unknown'}); wait for it."
            ) from None
        except OSError as error:
            raise EnvironmentFaultError(
                f"The folder {str(run_dir)!r} cannot be locked ({error.strerror}); start the command in a folder on a "
                "local disk."
            ) from None
        with suppress(OSError):  # a full disk is reported elsewhere, and the lock works without the pid in it
            lock.truncate(0)
            lock.write(str(os.getpid()).encode())
        yield


def _model(promised: Mapping[str, Any]) -> str:
    """The model's folder at the time of the tune; if that no longer exists, the name that the user gave."""
    folder = promised["folder"]
    return folder if folder is not None and Path(folder).is_dir() else original_text(promised["name"])


def _options(promise: Mapping[str, Any], document: Mapping[str, Any], asked: VerifyOptions) -> TuneOptions:
    workload, on_cpu = promise["workload"], promise["device"] == "cpu"
    limit = promise["memory_per_gpu"]["limit_bytes"]
    # A limit equal to the whole GPU is no limit: another driver may leave a little less memory.
    smallest = 0 if on_cpu else min((gpu.total_bytes for gpu in visible_gpus() if not gpu.fault), default=0)
    swap = [section["nvme_path"] for section in _offloads(document) if "nvme_path" in section]
    script = asked.script or tuple(promise.get("script", {}).get("command", ()))
    partly: dict[str, Any] = {"freeze": tuple(workload.get("freeze", ()))}
    if "lora" in workload:
        partly["lora"] = Lora.from_peft(workload["lora"])
    return TuneOptions(
        model="" if script else _model(promise["model"]),
        script=script,
        gpus=0 if on_cpu else promise["world_size"],
        nodes=promise["num_nodes"] if promise["num_nodes"] > 1 or asked.hostfile else None,
        hostfile=asked.hostfile,
        launcher=asked.launcher,
        gpu_memory=limit if on_cpu or limit < 0.99 * smallest else None,
        nvme_path=Path(swap[0]) if swap else None,
        **workload | partly,
    )


def _candidate(promise: Mapping[str, Any], workload: Workload, machine: Machine) -> Candidate:
    return candidate_of(candidate_key_in(promise), workload.global_batch_size, machine.world_size)


def _steps(asked: VerifyOptions, workload: Workload) -> StepPolicy:
    if asked.steps is not None:
        return StepPolicy(minimum=asked.steps, maximum=asked.steps, seconds=_LONGEST_SECONDS)
    if asked.minutes is not None:
        return StepPolicy(minimum=PROOF_STEPS, maximum=1 << 40, seconds=60 * asked.minutes, target_spread=0.0)
    return replace(StepPolicy(), **proof_steps(workload))


def _config(
    document: Mapping[str, Any], candidate: Candidate, accumulation: int, machine: Machine, swap_prefix: str
) -> dict[str, Any]:
    """The file's own configuration, even if this version of ladder would write another one."""
    # The ranks make the optimizer of a trial themselves.
    config = {key: value for key, value in document.items() if key not in (SECTION, "optimizer")}
    zero = {**config.get("zero_optimization", {})}
    for name in ("offload_optimizer", "offload_param"):
        if "nvme_path" in zero.get(name, {}) and machine.nvme_path is not None:
            swap = machine.nvme_path / f"{swap_prefix}-{_TRIAL}"
            zero[name] = {**zero[name], "nvme_path": str(swap)}
    config |= {"zero_optimization": zero} if zero else {}
    config["gradient_accumulation_steps"] = accumulation
    if "train_batch_size" in config:
        config["train_batch_size"] = candidate.micro_batch * accumulation * machine.world_size
    return config


def _spec(
    config: dict[str, Any], candidate: Candidate, workload: Workload, machine: Machine, run_dir: Path, steps: StepPolicy
) -> TrialSpec:
    folder = run_dir / "trials" / _TRIAL
    return trial_spec(
        _TRIAL,
        folder,
        workload,
        machine,
        candidate.engine,
        config,
        [candidate_spec(candidate)],
        steps=steps,
        proof=True,
        script=script_spec(workload, candidate, machine, config, folder),
    )


def _prove(
    spec: TrialSpec, candidate: Candidate, workload: Workload, launcher: Launcher, tell: Subscriber
) -> tuple[Record, float]:
    """The proof's record, and the seconds it took. InterruptedVerificationError if the user ended it."""
    shutil.rmtree(spec.folder, ignore_errors=True)  # an earlier verification's
    tell(TrialBegins(spec, "what the file promises"))
    deadlines = with_preparation(trial_deadlines(workload, candidate.engine), workload)
    if spec.steps.seconds > PROOF_SECONDS:
        deadlines = replace(deadlines, total=deadlines.total + min(spec.steps.seconds, _LONGEST_SECONDS))
    try:
        run = launcher.run(spec, deadlines, hearing(tell))
    finally:
        if spec.script is not None:
            shutil.rmtree(spec.script.scratch, ignore_errors=True)
    records = judge(run, workload, [candidate])
    tell(TrialEnds(run, tuple(records)))
    if run.stop is not None and run.stop.kind == "cancelled":
        raise InterruptedVerificationError("The verification was interrupted.")
    if run.stop is not None and run.stop.kind == "environment":
        raise EnvironmentFaultError(f"The verification could not finish: {run.stop.sentence}; start it again.")
    if why := false_start(run, records):
        raise EnvironmentFaultError(f"The verification has no result: {why}; start it again.")
    # A proof that failed after measuring, in teardown or while saving, has a second record.
    failed = [record for record in records if record.outcome.kind != "fits"]
    return (failed or records)[0], sum(trial_seconds(run).values())


def _offloads(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    zero = document.get("zero_optimization", {})
    return [zero[name] for name in ("offload_optimizer", "offload_param") if name in zero]
