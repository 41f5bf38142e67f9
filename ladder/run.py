"""One whole tune from its options: workload and machine, operators, launcher, search, proof, files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ladder import __version__
from ladder.candidates import RUNGS, RUNGS_BY_NAME, Candidate, Rung
from ladder.emit import Answer, emit_all
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.history import History
from ladder.launch.local import LocalLauncher
from ladder.launch.operators import build_operators
from ladder.launch.server import kill_marked
from ladder.machine import Machine, check_nvme_path, detect_machine, operators_of, unsupported_reason
from ladder.model_source import resolve_model, smoke_defaults
from ladder.outcome import Record
from ladder.search.policy import STRATEGIES
from ladder.search.speed import mfu
from ladder.shapes import default_seq_len, default_task
from ladder.tuner import Tuner, TuneResult, View, closing, make_space, micro_batches_of, run_fingerprint
from ladder.units import format_bytes, parse_bytes
from ladder.workload import Dtype, OptimizerName, Task, Workload

DEFAULT_GLOBAL_BATCH = 128
_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "optuna")


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What the user asked for; None means our default. Sizes in bytes, times in seconds."""

    model: str
    gpus: int | None = None
    task: Task | None = None
    seq_len: int | None = None
    global_batch_size: int | None = None
    dtype: Dtype = "bf16"
    optimizer: OptimizerName = "adamw"
    gradient_clipping: float = 1.0
    gpu_memory: int | None = None
    host_memory: int | None = None
    nvme_path: Path | None = None
    time_budget: float | None = None
    strategy: str = "auto"
    tolerance: float = 0.02
    """How much faster than the answer a candidate left untried may be."""
    audit: float = 0.0
    """The share of the pruned candidates that is measured anyway."""
    rungs: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = ()
    run_dir: Path | None = None
    output: Path = Path("best_config.json")
    save_weights: Path | None = None
    cold: bool = False


@dataclass(frozen=True, kw_only=True)
class TuneOutput:
    """What a tune leaves behind: its result, the answer if one is proven, and the files written."""

    result: TuneResult
    answer: Answer | None
    files: list[Path]
    run_dir: Path
    trial_seconds: dict[str, dict[str, float]]
    """Where each trial's time went, by trial and phase."""


def run_tune(options: TuneOptions, view: View, cancelled: Callable[[], bool] = lambda: False) -> TuneOutput:
    """Tune, prove, and write the answer. Raises a LadderError for everything that is not a bug."""
    workload, machine = _workload_and_machine(options, view)
    micro_batches = micro_batches_of(workload, machine.world_size, options.micro_batches)
    output = _writable_output(options.output)
    versions = package_versions()
    fingerprint, facts = run_fingerprint(workload, machine, versions)
    run_dir = options.run_dir or Path("ladder-runs") / f"{_slug(workload.model.name)}-{fingerprint}"
    with History(run_dir, fingerprint, facts) as history:
        marker = "ladder-" + hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
        _sweep(marker, machine)
        environment = rank_environment(machine)
        rungs = [rung for rung in RUNGS if not options.rungs or rung.name in options.rungs]
        machine, operators = _with_operators(machine, rungs, workload, environment, view)
        space, unsupported = make_space(
            workload, machine, rungs, micro_batches, tolerance=options.tolerance, audit=options.audit
        )
        job = {"model_config": dict(workload.model.config), "task": workload.task, "operators": operators}
        launcher = LocalLauncher(
            marker=marker,
            job=job,
            environment=environment,
            log=run_dir / "server.log",
            gpu_uuids=tuple(gpu.uuid for gpu in machine.gpus),
            cancelled=cancelled,
            cold=options.cold,
        )
        try:
            with closing(launcher):
                result = Tuner(
                    workload=workload,
                    machine=machine,
                    space=space,
                    unsupported=unsupported,
                    history=history,
                    launcher=launcher,
                    view=view,
                    cancelled=cancelled,
                    time_budget=options.time_budget,
                    swap_prefix=marker,
                    save_folder=options.save_weights,
                ).tune(STRATEGIES[options.strategy])
        finally:
            _sweep(marker, machine)
        seconds = history.trial_seconds()
    answer = _answer(result.answer, workload, machine, space.by_key, versions, run_dir) if result.answer else None
    files = emit_all(answer, output) if answer else []
    return TuneOutput(result=result, answer=answer, files=files, run_dir=run_dir, trial_seconds=seconds)


def _workload_and_machine(options: TuneOptions, view: View) -> tuple[Workload, Machine]:
    model = resolve_model(options.model, task=options.task)
    if model.note:
        view.note(model.note)
    nvme_path = options.nvme_path.resolve() if options.nvme_path is not None else None
    if nvme_path is not None:
        check_nvme_path(nvme_path)
    machine = detect_machine(
        gpus=options.gpus, gpu_memory=options.gpu_memory, host_memory=options.host_memory, nvme_path=nvme_path
    )
    smoke = (smoke_defaults(model) or {}) if machine.device == "cpu" else {}
    if options.gpu_memory is None and "gpu_memory" in smoke:
        machine = replace(machine, memory_limit=parse_bytes(smoke["gpu_memory"]))
        view.note(f"{model.name} is the smoke model: each CPU rank is held to {smoke['gpu_memory']} (--gpu-memory).")
    seq_len = options.seq_len or smoke.get("seq_len") or default_seq_len(model)
    if model.max_positions is not None and seq_len > model.max_positions:
        raise UsageError(f"--seq-len {seq_len} is more than the {model.max_positions} positions {model.name} has.")
    batch = options.global_batch_size or smoke.get("global_batch_size") or _default_batch(machine.world_size)
    workload = Workload(
        model=model,
        task=options.task or default_task(model.model_type, model.config),
        seq_len=seq_len,
        global_batch_size=batch,
        dtype=options.dtype,
        optimizer=options.optimizer,
        gradient_clipping=options.gradient_clipping,
    )
    view.note(_introduction(workload, machine))
    return workload, machine


def _default_batch(world_size: int) -> int:
    """128 sequences, or the next number that divides over the ranks."""
    return -(-DEFAULT_GLOBAL_BATCH // world_size) * world_size


def _introduction(workload: Workload, machine: Machine) -> str:
    ranks = f"{machine.world_size} × {machine.gpu_name}" if machine.gpus else f"{machine.world_size} CPU ranks"
    return (
        f"{workload.model.name} ({workload.model.num_parameters / 1e9:.3g} billion parameters, {workload.task}) on "
        f"{ranks}, {format_bytes(machine.memory_limit)} each; {workload.dtype}, {workload.optimizer}, sequence length "
        f"{workload.seq_len}, global batch {workload.global_batch_size} sequences."
    )


def _writable_output(output: Path) -> Path:
    """Found before any trial: hours of trials must not end at a file that cannot be written."""
    folder = output.parent
    if output.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise EnvironmentFaultError(
            f"--output {output} cannot be written; choose a file in a folder that exists and is yours."
        )
    if output.exists() and not os.access(output, os.W_OK):
        raise EnvironmentFaultError(f"--output {output} exists and is read-only; choose another name.")
    return output


def _with_operators(
    machine: Machine, rungs: Sequence[Rung], workload: Workload, environment: dict[str, str], view: View
) -> tuple[Machine, list[str]]:
    """The machine with the reasons for what it does not support, and the operators that are built and load."""
    unsupported = {rung.name: reason for rung in rungs if (reason := unsupported_reason(rung, machine)) is not None}
    needed = {rung: operators_of(rung, machine, workload.optimizer) for rung in rungs if rung.name not in unsupported}
    names = sorted({name for operators in needed.values() for name in operators})
    # DeepSpeed's CPU backend loads this one in every rank as it starts.
    always = ["shm_comm"] if machine.device == "cpu" else []
    if names or always:
        view.note(f"Building DeepSpeed operators if need be: {', '.join(always + names)}.")
    built = build_operators(always + names, environment)
    for name in always:
        if (reason := built[name]) is not None:
            raise EnvironmentFaultError(
                f"DeepSpeed's {name} operator cannot be built ({reason}); install a C++ compiler "
                "(Debian and Ubuntu: apt-get install g++) and try again."
            )
    for rung, operators in needed.items():
        for name in operators:
            if (reason := built[name]) is not None:
                unsupported[rung.name] = f"DeepSpeed's {name} operator cannot be built: {reason}"
    return replace(machine, unsupported=unsupported), [name for name in always + names if built[name] is None]


def rank_environment(machine: Machine) -> dict[str, str]:
    """What the trial server and its ranks see beyond the user's own environment. Trials need no network, no token."""
    environment = {
        "DS_ACCELERATOR": machine.device,
        "OMP_NUM_THREADS": str(machine.host_threads),
        "HF_HUB_OFFLINE": "1",
        "USE_HUB_KERNELS": "NO",  # transformers would fetch kernels from the Hub by itself
        "OPENBLAS_NUM_THREADS": "1",  # numpy's pool would be threads in a process that forks
        # Asks NVML and not CUDA whether there are GPUs: a process that has asked CUDA cannot be forked.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    if machine.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in machine.gpus)
    return environment


def _sweep(marker: str, machine: Machine) -> None:
    """What an earlier tune of this run folder left when it was killed: its processes and its swap files."""
    kill_marked(marker)
    if machine.nvme_path is not None:
        for leftover in machine.nvme_path.glob(f"{marker}-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _answer(
    record: Record,
    workload: Workload,
    machine: Machine,
    by_key: dict[str, Candidate],
    versions: dict[str, str],
    run_dir: Path,
) -> Answer:
    candidate, measurement = by_key[record.candidate_key], record.measurement
    assert measurement is not None
    assert record.tokens_per_second is not None
    return Answer(
        workload=workload,
        candidate=candidate,
        measurement=measurement,
        tokens_per_second=record.tokens_per_second,
        step_seconds=measurement.step_seconds(candidate.accumulation),
        mfu=mfu(workload, record.tokens_per_second, machine.world_size, machine.gpu_name),
        world_size=machine.world_size,
        device=machine.device,
        gpu_name=machine.gpu_name,
        memory_limit=machine.memory_limit,
        host_threads=machine.host_threads,
        nvme_path=machine.nvme_path,
        versions=versions,
        run_dir=run_dir.resolve(),
        proof={
            "trial": record.trial,
            "optimizer_steps": measurement.num_steps,
            "evaluation": True,
            "gathered_16bit_weights": True,
            "tokens_per_second": round(record.tokens_per_second, 1),
        },
        warnings=record.warnings,
    )


def package_versions() -> dict[str, str]:
    """Versions of what decides a measurement, without importing any of it."""
    versions = {"ladder": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name.strip("/").rsplit("/", 1)[-1]).strip("-.") or "model"


def check_rungs(names: Sequence[str]) -> tuple[str, ...]:
    """UsageError for a name that is no rung."""
    for name in names:
        if name not in RUNGS_BY_NAME:
            raise UsageError(f"--rung {name} is unknown; the rungs are {', '.join(RUNGS_BY_NAME)}.")
    return tuple(names)
