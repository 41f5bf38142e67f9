"""`ladder doctor`: checks whether this machine can run trials, and says what to do if it cannot."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ladder.cli.declared import takes
from ladder.errors import EXIT_FOUND, EnvironmentFaultError, UsageError
from ladder.options.declaring import Option
from ladder.options.kinds import whole

if TYPE_CHECKING:
    from ladder.doctor.check import Check
    from ladder.options.tune import TuneOptions

_STYLES = {"OK": "green", "OPEN": "cyan", "WARN": "yellow", "FAIL": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is checked, and how it is printed."""

    build: Annotated[bool, Option("Build DeepSpeed's operators now; takes minutes.")] = False
    measure: Annotated[bool, Option("Measure the machine's speeds now, for tunes to start from; takes seconds.")] = (
        False
    )
    gpus: Annotated[
        int | None, Option("With --measure: so many GPUs of all nodes, 0 for the CPU; else all.", kind=whole(0))
    ] = None
    nodes: Annotated[
        int | None,
        Option(
            "With --measure: so many nodes of the Slurm job, of --hostfile or of the Ray cluster, and the links "
            "between them.",
            kind=whole(1),
        ),
    ] = None
    hostfile: Annotated[
        Path | None, Option("With --measure: the nodes in this file of lines `host slots=N`, by ssh.")
    ] = None
    launcher: Annotated[Literal["local", "ray"], Option("ray: with --measure, --nodes of a Ray cluster.")] = "local"
    nvme_path: Annotated[Path | None, Option("Also try this folder for NVMe offload.")] = None
    model: Annotated[str | None, Option("Also see whether this model can be tuned.")] = None
    python: Annotated[str, Option("Check the environment of this interpreter for training.", metavar="PATH")] = ""
    output_format: Annotated[Literal["text", "json"], Option("How to print it.", flag="--format")] = "text"


@takes(DoctorOptions)
def doctor(asked: DoctorOptions) -> int:
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

    if not asked.measure and (asked.nodes is not None or asked.hostfile is not None or asked.launcher != "local"):
        raise UsageError("--nodes, --hostfile and --launcher say what --measure measures; add --measure.")
    where = TuneOptions(
        nodes=asked.nodes,
        hostfile=asked.hostfile,
        launcher=asked.launcher,
        gpus=asked.gpus,
        nvme_path=asked.nvme_path,
    )
    speeds = partial(_speeds, asked.measure, where)
    checks = []
    with ranks_in(asked.python, must_train=False):
        for check in _checks(speeds, asked):
            checks.append(check)
            if asked.output_format == "text":
                _print(check)
    failed = [check.name for check in checks if check.status == "FAIL"]
    if asked.output_format == "json":
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


def _checks(speeds: Callable[[], Iterator[Check]], asked: DoctorOptions) -> Iterator[Check]:
    from ladder.doctor import hardware, hub, software
    from ladder.doctor.check import guarded

    cuda = hardware.driver_cuda()
    looks: dict[str, Callable[[], Iterator[Check]]] = {
        "python": hardware.python,
        "packages": software.packages,
        "GPUs": hardware.gpus,
        "torch and CUDA": partial(software.torch_and_driver, cuda),
        "compiler": software.compilers,
        "operators": partial(software.operators, build=asked.build, on_gpus=cuda is not None),
        "trials of scripts": software.protection,
        "memory": hardware.memory,
        "NVMe": partial(hardware.nvme, asked.nvme_path),
        "speeds": speeds,
        "Hub token": hub.token,
    }
    if asked.model is not None:
        looks["model"] = partial(hub.access, asked.model)
    for name, look in looks.items():
        yield from guarded(name, look)
