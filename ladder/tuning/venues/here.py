"""This host as the place of a tune's trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.candidates import Rung, Technique
from ladder.events.protocol import RUN_MARKER
from ladder.launch.local import PRELOAD_IF_THERE, LocalLauncher
from ladder.launch.rank_environment import environment_of_trials
from ladder.launch.sweep import Sweep, run_marker
from ladder.machine.described import Machine
from ladder.machine.lease import Leases
from ladder.machine.machine import detect_machine
from ladder.machine.nvme import check_nvme_path
from ladder.options.technique_choices import TechniqueChoices, require_adapters, techniques_tried
from ladder.tuning.obstacles import with_obstacles
from ladder.tuning.operators import Operators, operators_of_every_trial
from ladder.tuning.script_look import look_here
from ladder.tuning.tune_events import Subscriber
from ladder.tuning.venues.base import OpenVenue, Venue
from ladder.workload.script import Script
from ladder.workload.workload import Workload

if TYPE_CHECKING:
    from ladder.options.tune import TuneOptions


class ThisHost(Venue):
    """Ranks on this host's GPUs or CPU."""

    looks_again = True

    def __init__(self, options: TuneOptions, leases: Leases, tell: Subscriber, cancelled: Callable[[], bool]) -> None:
        self._options, self._leases, self._tell, self._cancelled = options, leases, tell, cancelled

    def machine(self) -> Machine:
        """The machine as detected; its GPUs, or else its cores, are leased from here on."""
        options = self._options
        nvme_path = options.nvme_path.resolve() if options.nvme_path is not None else None
        nvme_write_speed = check_nvme_path(nvme_path) if nvme_path is not None else None
        machine = detect_machine(
            gpus=options.gpus,
            gpu_memory=options.gpu_memory,
            host_memory=options.host_memory,
            nvme_path=nvme_path,
            choose=self._leases.choose,
        )
        if machine.device == "cpu":
            self._leases.hold_cores()
        return replace(machine, nvme_write_speed=nvme_write_speed)

    def look(self, command: Sequence[str], machine: Machine, note: Callable[[str], None]) -> Script:
        """It runs up to the beginning of its training."""
        return look_here(command, machine, note, self._cancelled)

    def techniques(self, choices: TechniqueChoices, workload: Workload, machine: Machine) -> list[Technique]:
        """Those that were asked for, and those whose libraries are installed."""
        require_adapters(workload)
        return techniques_tried(choices, workload, machine.device, on_paper=False)

    @contextmanager
    def opened(self, machine: Machine, workload: Workload, rungs: Sequence[Rung], run_dir: Path) -> Iterator[OpenVenue]:
        """Before and after the trials, what a tune of this run may have left is removed."""
        marker = run_marker(run_dir)
        sweep = Sweep(marker, run_dir)
        if machine.nvme_path is not None:
            sweep.remember(machine.nvme_path)
        sweep()
        # Operator builds get the marker too.
        environment = {**environment_of_trials(machine, workload), RUN_MARKER: marker}
        launcher = LocalLauncher(
            marker=marker,
            job=job_of(workload),
            environment=environment,
            log=run_dir / "server.log",
            gpu_uuids=tuple(gpu.uuid for gpu in machine.gpus),
            cancelled=self._cancelled,
            cold=self._options.cold,
        )
        try:
            with closing(launcher):
                operators = Operators(
                    operators_of_every_trial(workload),
                    workload.optimizer,
                    environment,
                    launcher.load,
                    self._tell,
                    self._cancelled,
                )
                with closing(operators):
                    machine = with_obstacles(machine, rungs, workload)
                    yield OpenVenue(machine=machine, launcher=launcher, operators=operators, swap_prefix=marker)
        finally:
            sweep()


def job_of(workload: Workload) -> dict[str, Any]:
    """What a trial server imports for it."""
    if workload.script is None:
        # peft asks once whether bitsandbytes is there, which a rank with quantised weights has to answer anew.
        adapters = ["peft"] if workload.lora is not None and workload.load_in is None else []
        known = {"model_config": dict(workload.model.config), "task": workload.task}
        return {**known, "preload": adapters}
    more = {"preload": ["ladder.trial.script.running"], PRELOAD_IF_THERE: list(workload.script.facts.modules)}
    return {"model_config": None, "task": workload.task, **more}
