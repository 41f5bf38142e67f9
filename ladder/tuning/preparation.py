"""Before the first trial: finds the rungs that cannot work, and sets the ranks' environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ladder.backends.registry import backend_of
from ladder.candidates import Rung
from ladder.doctor.software import about_torch
from ladder.errors import UsageError
from ladder.events.protection import ROOM
from ladder.launch.secrets import blanked_secrets
from ladder.machine.described import Machine
from ladder.machine.host import environment_of_a_cpu_rank
from ladder.machine.interpreter import version_of
from ladder.machine.machine import unsupported_reason
from ladder.machine.nvme import nvme_shortage
from ladder.machine.versions import is_within
from ladder.tuning.operators import OperatorMissingError
from ladder.tuning.problem import place_obstacle
from ladder.workload.workload import Workload

_OF_THE_HUB = (
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_TOKEN",
    "HF_TOKEN_PATH",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN",
)
"""Variables that say how a script reads the Hub; those of this process go to all nodes."""

_SHARE_OF_OVERLAYS = 8
"""Part of the host's memory that a trial may fill with what it writes. Chosen: it leaves offload its memory."""


def with_obstacles(machine: Machine, rungs: Sequence[Rung], workload: Workload) -> Machine:
    """The machine with the reasons for rungs that it does not support."""
    return replace(machine, unsupported=obstacles(rungs, machine, workload))


def operators_of_every_trial(workload: Workload) -> tuple[str, ...]:
    """Those that a script loads itself; a model's trials need none (`trial.backends`)."""
    return workload.script.facts.operators if workload.script is not None else ()


def without_operator(
    machine: Machine, rungs: Sequence[Rung], workload: Workload, missing: OperatorMissingError
) -> Machine:
    """The machine once it is known that an operator cannot be built there."""
    lost = {
        rung.name: str(missing)
        for rung in rungs
        if missing.name in backend_of(rung).operators(rung, workload.optimizer)
    }
    return replace(machine, unsupported={**lost, **machine.unsupported})


def require_precision(machine: Machine, workload: Workload) -> None:
    """UsageError if every trial would fail because the CPU cannot train in the workload's precision."""
    if machine.device != "cpu" or workload.dtype != "fp16":
        return
    try:
        has_fp16 = about_torch()["cpu_fp16"]
    except (OSError, subprocess.TimeoutExpired):
        return  # the trials will say what is wrong with torch
    if not has_fp16:
        raise UsageError("This CPU cannot train in fp16, which needs AVX512-FP16 instructions; use --dtype bf16.")


def obstacles(rungs: Sequence[Rung], machine: Machine, workload: Workload) -> dict[str, str]:
    """By rung name: why it cannot work on this machine, as far as is known before operators are built."""
    return {rung.name: reason for rung in rungs if (reason := _obstacle(rung, machine, workload)) is not None}


def missing_package(rung: Rung) -> str:
    """What has to be installed for `rung`, and is not; empty if nothing is missing."""
    package = backend_of(rung).package
    return package if package and not version_of(package) else ""


def flaw_of(rung: Rung, workload: Workload) -> str:
    """Why what is installed cannot train `rung`, or trains it wrongly; empty if it can."""
    if package := missing_package(rung):
        return f"{package} is not installed; `pip install {package}`"
    for flaw in backend_of(rung).flaws(workload):
        if flaw.concerns(workload, rung) and is_within(version := version_of(flaw.package), flaw.versions):
            return f"{flaw.package} {version} {flaw.why}; install another version than {flaw.versions}"
    return ""


def _obstacle(rung: Rung, machine: Machine, workload: Workload) -> str | None:
    if flaw := flaw_of(rung, workload):
        return flaw
    reason = place_obstacle(rung, machine, workload) or unsupported_reason(
        rung, machine, backend_of(rung).operators(rung, workload.optimizer)
    )
    if reason is None and machine.nvme_path is not None and machine.nvme_write_speed is not None:
        reason = nvme_shortage(rung, workload, machine.nvme_path, machine.nvme_write_speed)
    return reason


def environment_of_trials(machine: Machine, workload: Workload) -> dict[str, str]:
    """Changes to the user's environment for the trials of `workload`."""
    return rank_environment(machine) if workload.script is None else script_environment(machine)


def script_environment(machine: Machine) -> dict[str, str]:
    """As `rank_environment`, for the user's own script: it reads the Hub as it does by itself, and tells it nothing.

    The look, the trials and the training have to agree in this. A tokenizer keeps whether it was loaded offline, and
    `datasets` would take it for another one and tokenise anew.
    """
    room = machine.host_memory // machine.num_nodes // _SHARE_OF_OVERLAYS
    told = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
    environment = rank_environment(machine) | told | {ROOM: os.environ.get(ROOM) or str(room)}
    del environment["HF_HUB_OFFLINE"]
    return environment | {name: os.environ[name] for name in _OF_THE_HUB if name in os.environ}


def rank_environment(machine: Machine) -> dict[str, str]:
    """Changes to the user's environment for the trial server and its ranks. A model's trials need no network and no
    token."""
    environment = {
        **blanked_secrets(os.environ),
        "DS_ACCELERATOR": machine.device,
        "OMP_NUM_THREADS": str(machine.host_threads),
        "HF_HUB_OFFLINE": "1",
        "USE_HUB_KERNELS": "NO",  # otherwise transformers downloads kernels from the Hub
        "OPENBLAS_NUM_THREADS": "1",  # numpy would start threads in a process that forks
        # Torch then asks NVML instead of CUDA whether there are GPUs: after CUDA is initialised, forks cannot use it.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    environment |= environment_of_a_cpu_rank(os.environ) if machine.device == "cpu" else machine.allocator
    if machine.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in machine.gpus)
    return environment


def without_gpus(environment: Mapping[str, str]) -> dict[str, str]:
    """For agents on nodes, each of which knows its own GPUs."""
    return {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
