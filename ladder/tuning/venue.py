"""Where a tune's trials run, and everything that differs between places: here, this host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ladder.candidates import Rung, Technique
from ladder.emit import Answer
from ladder.errors import UsageError
from ladder.events.protocol import RUN_MARKER
from ladder.launch.base import Launcher
from ladder.launch.local import PRELOAD_IF_THERE, LocalLauncher
from ladder.machine.described import Machine
from ladder.machine.lease import Leases
from ladder.machine.machine import detect_machine
from ladder.machine.nvme import check_nvme_path
from ladder.tuning.operators import Operators
from ladder.tuning.preparation import environment_of_trials, operators_of_every_trial, with_obstacles
from ladder.tuning.script_look import look_here
from ladder.tuning.sweep import Sweep, run_marker
from ladder.tuning.technique_choices import TechniqueChoices, require_adapters, techniques_tried
from ladder.tuning.tune_events import Subscriber
from ladder.workload.script import Script
from ladder.workload.workload import Workload

if TYPE_CHECKING:
    from ladder.tuning.options import TuneOptions


@dataclass(frozen=True, kw_only=True)
class OpenVenue:
    """An open venue, with what the tuner needs for trials."""

    machine: Machine
    """With the reasons for rungs that it does not support."""
    launcher: Launcher
    operators: Operators | None = None
    """Of DeepSpeed, for trials that are real."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, as the launcher counts them."""
    swap_prefix: str = "ladder-swap"

    def seconds_since(self, began: float) -> float:
        """Of a time budget, since `began` on CLOCK_MONOTONIC: what jobs waited in the queue is not among them."""
        return self.clock() - began


class Venue(Protocol):
    """Where the trials of one tune run."""

    @property
    def paper_name(self) -> str | None:
        """The name of the machine on paper; None if trials are real."""

    looks_again: bool
    """A script can be looked at once more after the trials."""

    @property
    def laws(self) -> Mapping[str, Any] | None:
        """The description of the machine on paper, so that its history is never used for a real one."""

    def machine(self) -> Machine:
        """The machine, limited to what the user allows."""

    def look(self, command: Sequence[str], machine: Machine, note: Callable[[str], None]) -> Script:
        """What the user's own script trains. UsageError where it cannot be run here."""

    def introduce(self) -> None:
        """Tell the user what they need to know about figures from here."""

    def techniques(self, choices: TechniqueChoices, workload: Workload, machine: Machine) -> list[Technique]:
        """The techniques to try here. LadderError if one that was asked for cannot be used."""

    def opened(
        self, machine: Machine, workload: Workload, rungs: Sequence[Rung], run_dir: Path
    ) -> AbstractContextManager[OpenVenue]:
        """Make the venue ready for trials; nothing of them is left when it closes."""

    def signed(self, answer: Answer) -> Answer:
        """`answer` for the files, which say where its figures come from."""

    def close(self) -> None:
        """End what `machine` began, also if the venue was never opened."""


def venue_of(options: TuneOptions, leases: Leases, tell: Subscriber, cancelled: Callable[[], bool]) -> Venue:
    """The machine of `--launcher simulated --machine`, or this host.

    UsageError if one is given without the other, or if an option has no effect on a simulated machine.
    """
    if options.launcher == "simulated":
        from ladder.tuning.paper_venue import OnPaper, paper_machine  # only a simulated tune waits for this import

        return OnPaper(paper_machine(options), options, tell, cancelled)
    if options.machine is not None:
        raise UsageError("--machine names a simulated machine: add --launcher simulated, or leave it out.")
    if is_on_nodes(options):
        from ladder.tuning.nodes_venue import OnNodes  # it builds on this module

        return OnNodes(options, leases, tell, cancelled)
    return ThisHost(options, leases, tell, cancelled)


def is_on_nodes(options: TuneOptions) -> bool:
    """Whether agents on nodes run the trials, which may be one node."""
    return options.launcher == "ray" or options.hostfile is not None or (options.nodes or 1) > 1


class ThisHost:
    """Ranks on this host's GPUs or CPU."""

    paper_name = None
    looks_again = True
    laws = None

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

    def introduce(self) -> None:
        """Nothing to say: the figures are measured."""

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

    def signed(self, answer: Answer) -> Answer:
        """Unchanged: its figures were measured here."""
        return answer

    def close(self) -> None:
        """Nothing to end: the leases are given back by whoever made them."""


def job_of(workload: Workload) -> dict[str, Any]:
    """What a trial server imports for it."""
    if workload.script is None:
        # peft asks once whether bitsandbytes is there, which a rank with quantised weights has to answer anew.
        adapters = ["peft"] if workload.lora is not None and workload.load_in is None else []
        known = {"model_config": dict(workload.model.config), "task": workload.task}
        return {**known, "preload": adapters}
    more = {"preload": ["ladder.trial.script.running"], PRELOAD_IF_THERE: list(workload.script.facts.modules)}
    return {"model_config": None, "task": workload.task, **more}
