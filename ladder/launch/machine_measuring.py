"""Measures the machine's speeds in processes of their own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import IO

from ladder.errors import EnvironmentFaultError
from ladder.events.protocol import Share
from ladder.launch.modules import module_command, module_environment
from ladder.launch.watch import now
from ladder.machine.described import Machine
from ladder.machine.lease import InterruptedWaitError
from ladder.machine.rates import Found
from ladder.text import shown

MOST_SECONDS = 180.0
"""Chosen: as long as a trial server may take to import. Measuring itself takes 2 s on two CPU cores."""
_TICK_SECONDS = 0.1
"""Between two looks whether somebody still wants it. Chosen: a delay that nobody notices."""


def measure_points(machine: Machine, environment: Mapping[str, str]) -> Found:
    """What all ranks of this host measure.

    `environment` is that of trials. EnvironmentFaultError if nothing can be measured.
    """
    share = Share(first=0, count=machine.world_size, address="127.0.0.1")
    return measure_share(machine.device, [gpu.uuid for gpu in machine.gpus], share, machine.world_size, environment)


def measure_share(
    device: str,
    gpu_uuids: Sequence[str],
    share: Share,
    world: int,
    environment: Mapping[str, str],
    on_port: Callable[[int], None] = lambda port: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Found:
    """What this host's `share` of all `world` ranks measures; `on_port` is called with the port where they meet.

    EnvironmentFaultError if nothing can be measured; InterruptedWaitError if it was `cancelled`.
    """
    job = {
        "device": device,
        "gpu_uuids": list(gpu_uuids),
        "share": asdict(share),
        "world": world,
        "parent": os.getpid(),
    }
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            module_command("ladder.trial.measure_machine"),
            env=module_environment(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
                found = json.loads(_last_line(process.stdout, on_port, cancelled))
                return Found(rates=found["rates"], failed=found["failed"])
            except (OSError, ValueError, KeyError):
                raise _cannot_be_measured(errors) from None
            finally:
                process.kill()  # its ranks end with it


def _last_line(output: IO[bytes], on_port: Callable[[int], None], cancelled: Callable[[], bool]) -> bytes:
    """What it says last, after a first line with the port."""
    deadline, said = now() + MOST_SECONDS, b""
    while now() < deadline:
        if cancelled():
            raise InterruptedWaitError("interrupted while the machine was measured.")
        if not select.select([output], [], [], _TICK_SECONDS)[0]:
            continue
        if not (data := os.read(output.fileno(), 1 << 16)):
            return said.strip().rpartition(b"\n")[2]
        if b"\n" not in said and b"\n" in data:
            on_port(json.loads((said + data).partition(b"\n")[0])["port"])
        said += data
    raise EnvironmentFaultError(
        f"Measuring the machine took longer than {MOST_SECONDS:.0f} s; stop other work on it, and try again."
    )


def _cannot_be_measured(errors: IO[bytes]) -> EnvironmentFaultError:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "it ended without a message"
    return EnvironmentFaultError(
        f"The machine cannot be measured ({shown(last)}); `ladder doctor` says what trials lack."
    )
