"""`ladder doctor`: checks whether this machine can run trials, and says what to do if it cannot."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ladder.errors import EXIT_FOUND, EnvironmentFaultError, UsageError

if TYPE_CHECKING:
    from ladder.doctor.check import Check
    from ladder.options.tune import TuneOptions

_STYLES = {"OK": "green", "OPEN": "cyan", "WARN": "yellow", "FAIL": "bold red"}


class DoctorLauncher(str, Enum):
    local = "local"
    ray = "ray"


class DoctorFormat(str, Enum):
    text = "text"
    json = "json"


def doctor(
    build: Annotated[
        bool,
        typer.Option("--build/--no-build", help="Build DeepSpeed's operators now; takes minutes.", show_default=False),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure the machine's speeds now, for tunes to start from; takes seconds."),
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="With --measure: so many GPUs of all nodes, 0 for the CPU; else all."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="With --measure: so many nodes of the Slurm job, of --hostfile or of the Ray cluster, and the links "
            "between them.",
        ),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="With --measure: the nodes in this file of lines `host slots=N`, by ssh.")
    ] = None,
    launcher: Annotated[
        DoctorLauncher, typer.Option(help="ray: with --measure, --nodes of a Ray cluster.")
    ] = DoctorLauncher.local,
    nvme_path: Annotated[Path | None, typer.Option(help="Also try this folder for NVMe offload.")] = None,
    model: Annotated[str | None, typer.Option(help="Also see whether this model can be tuned.")] = None,
    python: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Check the environment of this interpreter for training.", show_default=False
        ),
    ] = "",
    output_format: Annotated[DoctorFormat, typer.Option("--format", help="How to print it.")] = DoctorFormat.text,
) -> int:
    """Check what trials need: GPUs, driver, packages, compilers, memory, drive and Hub; each problem with its fix.

    Ends with status 4 where something fails. The JSON is for a bug report and holds no secret.

    Examples:

      ladder doctor

      ladder doctor --build --nvme-path /tmp

      ladder doctor --measure --gpus 2

      ladder doctor --measure --nodes 2

      ladder doctor --model meta-llama/Llama-2-7b-hf --format json
    """
    from ladder.machine.environment import ranks_in
    from ladder.options.tune import TuneOptions

    if not measure and (nodes is not None or hostfile is not None or launcher is not DoctorLauncher.local):
        raise UsageError("--nodes, --hostfile and --launcher say what --measure measures; add --measure.")
    where = TuneOptions(nodes=nodes, hostfile=hostfile, launcher=launcher.value, gpus=gpus, nvme_path=nvme_path)
    speeds = partial(_speeds, measure, where)
    checks = []
    with ranks_in(python, must_train=False):
        for check in _checks(speeds, build=build, nvme_path=nvme_path, model=model):
            checks.append(check)
            if output_format is DoctorFormat.text:
                _print(check)
    failed = [check.name for check in checks if check.status == "FAIL"]
    if output_format is DoctorFormat.json:
        typer.echo(_as_json(checks, failed))
    if failed:
        raise EnvironmentFaultError(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}.")
    return EXIT_FOUND


def _print(check: Check) -> None:
    from rich.console import Console
    from rich.text import Text

    from ladder.text import shown

    console = Console(highlight=False)
    console.print(
        Text.assemble((f"{check.status:<5}", _STYLES[check.status]), shown(f"{check.name}: {check.sentence}"))
    )
    if check.fix:
        console.print(Text(f"     fix: {shown(check.fix)}", style="dim"))


def _as_json(checks: list[Check], failed: list[str]) -> str:
    """The checks as JSON that can be shared: without the path of the user's home and values of secret variables."""
    from ladder.launch.secrets import blanked_secrets

    text = json.dumps({"failed": failed, "checks": [asdict(check) for check in checks]}, indent=2)
    hidden = {os.environ[name]: "(secret)" for name in blanked_secrets(os.environ)} | {str(Path.home()): "~"}
    for value, instead in hidden.items():
        if len(value) > 1:
            text = text.replace(json.dumps(value)[1:-1], instead)
    return text


def _speeds(measure: bool, where: TuneOptions) -> Iterator[Check]:
    from ladder.cli.speeds import speeds

    yield from speeds(measure_now=measure, options=where)


def _checks(
    speeds: Callable[[], Iterator[Check]], *, build: bool, nvme_path: Path | None, model: str | None
) -> Iterator[Check]:
    from ladder.doctor import hardware, hub, software
    from ladder.doctor.check import guarded

    cuda = hardware.driver_cuda()
    looks: dict[str, Callable[[], Iterator[Check]]] = {
        "python": hardware.python,
        "packages": software.packages,
        "GPUs": hardware.gpus,
        "torch and CUDA": partial(software.torch_and_driver, cuda),
        "compiler": software.compilers,
        "operators": partial(software.operators, build=build, on_gpus=cuda is not None),
        "trials of scripts": software.protection,
        "memory": hardware.memory,
        "NVMe": partial(hardware.nvme, nvme_path),
        "speeds": speeds,
        "Hub token": hub.token,
    }
    if model is not None:
        looks["model"] = partial(hub.access, model)
    for name, look in looks.items():
        yield from guarded(name, look)
