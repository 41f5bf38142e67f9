"""The environment of ranks and of what starts them: changes to the user's own."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ladder.events.protection import ROOM
from ladder.launch.secrets import blanked_secrets
from ladder.machine.described import Machine
from ladder.machine.host import environment_of_a_cpu_rank
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
