"""Where a tune's trials run: on this host, or on a machine that exists on paper only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ladder.candidates import RUNGS, Rung
from ladder.errors import UsageError
from ladder.events.protocol import RUN_MARKER
from ladder.launch.base import Launcher
from ladder.launch.local import LocalLauncher
from ladder.machine.machine import Machine
from ladder.simulation.launcher import SimulatedLauncher
from ladder.simulation.paper_machine import SimulatedMachine, read_machine
from ladder.tuning.preparation import rank_environment, with_operators
from ladder.tuning.sweep import Sweep, run_marker
from ladder.tuning.tuner import View
from ladder.workload.workload import Workload

if TYPE_CHECKING:
    from ladder.tuning.options import TuneOptions


@dataclass(frozen=True, kw_only=True)
class Venue:
    """What the tuner needs of the place where its trials run."""

    machine: Machine
    """With the reasons for what it does not support."""
    launcher: Launcher
    clock: Callable[[], float] = time.monotonic
    """Seconds, as the launcher counts them."""
    swap_prefix: str = "ladder-swap"


@contextmanager
def on_this_host(
    machine: Machine,
    workload: Workload,
    rungs: Sequence[Rung],
    run_dir: Path,
    *,
    view: View,
    cancelled: Callable[[], bool],
    cold: bool,
) -> Iterator[Venue]:
    """Ranks on this host's GPUs or CPU. What an earlier tune of the run left is swept away before, and after it all."""
    marker = run_marker(run_dir)
    sweep = Sweep(marker, run_dir)
    if machine.nvme_path is not None:
        sweep.remember(machine.nvme_path)
    sweep()
    environment = {**rank_environment(machine), RUN_MARKER: marker}  # for what builds operators, too
    launcher = LocalLauncher(
        marker=marker,
        job={"model_config": dict(workload.model.config), "task": workload.task},
        environment=environment,
        log=run_dir / "server.log",
        gpu_uuids=tuple(gpu.uuid for gpu in machine.gpus),
        cancelled=cancelled,
        cold=cold,
    )
    try:
        with closing(launcher):
            machine, operators = with_operators(machine, rungs, workload, environment, view, cancelled)
            launcher.load(operators)
            yield Venue(machine=machine, launcher=launcher, swap_prefix=marker)
    finally:
        sweep()


@contextmanager
def on_paper(simulated: SimulatedMachine, machine: Machine, *, cancelled: Callable[[], bool]) -> Iterator[Venue]:
    """No process and no waiting: `machine` is `simulated` as the tune sees it."""
    launcher = SimulatedLauncher(simulated, cancelled=cancelled)
    with closing(launcher):
        yield Venue(machine=machine, launcher=launcher, clock=launcher.now)


def paper_machine(options: TuneOptions) -> SimulatedMachine | None:
    """The machine of `--launcher simulated --machine`, or None for this host.

    UsageError where one is given without the other, or where an option cannot take effect on paper.
    """
    if options.launcher != "simulated":
        if options.machine is not None:
            raise UsageError("--machine names a simulated machine: add --launcher simulated, or leave it out.")
        return None
    if options.machine is None:
        raise UsageError("--launcher simulated needs a --machine, such as a100-80 or a machine file.")
    for name, value in (("--cold", options.cold), ("--wait", options.wait), ("--save-weights", options.save_weights)):
        if value:
            raise UsageError(f"{name} has no effect with --launcher simulated, which runs nothing; leave it out.")
    if options.gpus == 0:
        raise UsageError("--gpus 0 asks for CPU ranks, and simulated machines have GPUs; leave one of them out.")
    simulated = read_machine(options.machine)
    if options.nvme_path is not None and not simulated.nvme_space:
        raise UsageError(f"--nvme-path: the machine {simulated.name} has no NVMe drive (nvme_space); leave it out.")
    return simulated


def as_a_tune_sees_it(simulated: SimulatedMachine, options: TuneOptions) -> Machine:
    """The paper machine, held to what the user allows. As on a real one, NVMe rungs take an --nvme-path."""
    machine = simulated.machine(options.gpus, gpu_memory=options.gpu_memory, host_memory=options.host_memory)
    without = {rung.name: "no --nvme-path was given" for rung in RUNGS if "nvme" in rung.devices}
    return replace(machine, nvme_path=options.nvme_path, unsupported={} if options.nvme_path else without)
