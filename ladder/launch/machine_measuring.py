"""Measures the machine's speeds in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from ladder.errors import EnvironmentFaultError
from ladder.launch.modules import module_command, module_environment
from ladder.machine.described import Machine
from ladder.text import shown

_SECONDS = 180.0
"""Chosen: as long as a trial server may take to import. Measuring itself takes 2 s on two CPU cores."""


def measure_points(
    machine: Machine, environment: Mapping[str, str]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """The points of each rate (`ladder.trial.machine_rates`), and by name why something was not measured.

    `environment` is that of trials. EnvironmentFaultError if nothing can be measured.
    """
    job = {
        "device": machine.device,
        "ranks": machine.world_size,
        "gpu_uuids": [gpu.uuid for gpu in machine.gpus],
        "parent": os.getpid(),
    }
    try:
        done = subprocess.run(
            module_command("ladder.trial.measure_machine"),
            input=json.dumps(job) + "\n",
            env=module_environment(environment),
            capture_output=True,
            text=True,
            timeout=_SECONDS,  # its ranks end with it
            check=False,
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise EnvironmentFaultError(
            f"Measuring the machine took longer than {_SECONDS:.0f} s; stop other work on it, and try again."
        ) from None
    except (OSError, ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]
        raise EnvironmentFaultError(
            f"The machine cannot be measured ({shown(last)}); `ladder doctor` says what trials lack."
        ) from None
    return found["rates"], found["failed"]
