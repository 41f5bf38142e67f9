"""Before the first trial: builds operators, finds the rungs that cannot work, and sets the ranks' environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace

from ladder.candidates import Rung
from ladder.doctor.builds import fix_of_build
from ladder.doctor.software import about_torch
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.launch.operator_builds import build_operators
from ladder.launch.secrets import blanked_secrets
from ladder.machine.described import Machine
from ladder.machine.host import environment_of_a_cpu_rank
from ladder.machine.machine import operators_of, unsupported_reason
from ladder.machine.nvme import nvme_shortage
from ladder.tuning.tune_events import Note, Subscriber
from ladder.workload.workload import Workload


def with_operators(
    machine: Machine,
    rungs: Sequence[Rung],
    workload: Workload,
    environment: dict[str, str],
    tell: Subscriber,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[Machine, list[str]]:
    """The machine with the reasons for rungs that it does not support, and the operators that are built and load."""
    unsupported = obstacles(rungs, machine, workload)
    needed = {rung: operators_of(rung, workload.optimizer) for rung in rungs if rung.name not in unsupported}
    names = sorted({name for operators in needed.values() for name in operators})
    # DeepSpeed's CPU backend loads this one in every rank as it starts.
    always = ["shm_comm"] if machine.device == "cpu" else []
    always += workload.script.facts.operators if workload.script is not None else ()
    if names or always:
        tell(Note(f"Building DeepSpeed operators unless they are built already: {', '.join(always + names)}."))
    built = build_operators(always + names, environment, cancelled)
    for name in always:
        if (reason := built[name]) is not None and not cancelled():
            raise EnvironmentFaultError(
                f"DeepSpeed's {name} operator cannot be built ({reason}); {fix_of_build(name, reason)}, and try again."
            )
    for rung, operators in needed.items():
        for name in operators:
            if (
                reason := built[name]
            ) is not None and not cancelled():  # a cancelled build says nothing about the operator
                unsupported[rung.name] = f"DeepSpeed's {name} operator cannot be built: {reason}"
    return replace(machine, unsupported=unsupported), [name for name in always + names if built[name] is None]


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


def _obstacle(rung: Rung, machine: Machine, workload: Workload) -> str | None:
    reason = unsupported_reason(rung, machine, workload.optimizer)
    if reason is None and machine.nvme_path is not None and machine.nvme_write_speed is not None:
        reason = nvme_shortage(rung, workload, machine.nvme_path, machine.nvme_write_speed)
    return reason


def rank_environment(machine: Machine) -> dict[str, str]:
    """Changes to the user's environment for the trial server and its ranks. Trials need no network and no token."""
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
