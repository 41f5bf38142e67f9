"""Where a tune's trials run: on this host or on a simulated machine; and everything that differs between the two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ladder.backends.registry import RUNGS_BY_NAME
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
from ladder.simulation.launcher import SimulatedLauncher
from ladder.simulation.paper_machine import SimulatedMachine, read_machine
from ladder.tuning.answering import said_to_be_simulated
from ladder.tuning.operators import Operators
from ladder.tuning.preparation import environment_of_trials, operators_of_every_trial, with_obstacles
from ladder.tuning.script_look import look_here
from ladder.tuning.sweep import Sweep, run_marker
from ladder.tuning.technique_choices import TechniqueChoices, advice, require_adapters, techniques_tried
from ladder.tuning.tune_events import Note, Subscriber, noting
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

    @property
    def laws(self) -> Mapping[str, Any] | None:
        """The description of the machine on paper, so that its history is never used for a real one."""

    def machine(self) -> Machine:
        """The machine, limited to what the user allows."""

    def look(self, command: Sequence[str], machine: Machine) -> Script:
        """What the user's own script trains. UsageError where it cannot be run here."""

    def introduce(self) -> None:
        """Tell the user what they need to know about figures from here."""

    def techniques(self, choices: TechniqueChoices, workload: Workload, machine: Machine) -> list[Technique]:
        """The techniques to try here. LadderError if one that was asked for cannot be used."""

    def opened(
        self, machine: Machine, workload: Workload, rungs: Sequence[Rung], run_dir: Path
    ) -> AbstractContextManager[OpenVenue]:
        """Make the venue ready for trials; nothing of them is left when it closes."""

    def signed(self, answer: Answer, machine: Machine) -> Answer:
        """`answer` for the files, which say where its figures come from."""

    def close(self) -> None:
        """End what `machine` began, also if the venue was never opened."""


def venue_of(options: TuneOptions, leases: Leases, tell: Subscriber, cancelled: Callable[[], bool]) -> Venue:
    """The machine of `--launcher simulated --machine`, or this host.

    UsageError if one is given without the other, or if an option has no effect on a simulated machine.
    """
    if options.launcher == "simulated":
        return OnPaper(_paper_machine(options), options, tell, cancelled)
    if options.machine is not None:
        raise UsageError("--machine names a simulated machine: add --launcher simulated, or leave it out.")
    if options.launcher == "slurm-jobs":
        from ladder.tuning.jobs_venue import OnJobs

        return OnJobs(options, leases, tell, cancelled)
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
    laws = None

    def __init__(self, options: TuneOptions, leases: Leases, tell: Subscriber, cancelled: Callable[[], bool]) -> None:
        self._options, self._leases, self._tell, self._cancelled = options, leases, tell, cancelled

    def machine(self) -> Machine:
        """The machine as detected; its GPUs are leased from here on."""
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
        return replace(machine, nvme_write_speed=nvme_write_speed)

    def look(self, command: Sequence[str], machine: Machine) -> Script:
        """It runs up to the beginning of its training."""
        return look_here(command, machine, noting(self._tell), self._cancelled)

    def introduce(self) -> None:
        """Nothing to say: the figures are measured."""

    def techniques(self, choices: TechniqueChoices, workload: Workload, machine: Machine) -> list[Technique]:
        """Those that were asked for, and those whose libraries are installed; the user is told of the latter."""
        require_adapters(workload)
        tried = techniques_tried(choices, workload, machine.device, on_paper=False)
        for sentence in advice(choices, workload, machine.device):
            self._tell(Note(sentence))
        return tried

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

    def signed(self, answer: Answer, machine: Machine) -> Answer:
        """Unchanged: its figures were measured here."""
        return answer

    def close(self) -> None:
        """Nothing to end: the leases are given back by whoever made them."""


class OnPaper:
    """A simulated machine: no processes, no waiting, and no libraries needed."""

    def __init__(
        self, simulated: SimulatedMachine, options: TuneOptions, tell: Subscriber, cancelled: Callable[[], bool]
    ) -> None:
        self._simulated, self._options, self._tell, self._cancelled = simulated, options, tell, cancelled

    @property
    def paper_name(self) -> str:
        """The name in its file."""
        return self._simulated.name

    @property
    def laws(self) -> Mapping[str, Any]:
        """Everything in its file."""
        return self._simulated.model_dump()

    def machine(self) -> Machine:
        """As on a real machine, NVMe rungs need an --nvme-path."""
        options = self._options
        machine = self._simulated.machine(options.gpus, gpu_memory=options.gpu_memory, host_memory=options.host_memory)
        without = {rung.name: "no --nvme-path was given" for rung in RUNGS_BY_NAME.values() if "nvme" in rung.devices}
        return replace(
            machine,
            nvme_path=options.nvme_path,
            unsupported=machine.unsupported | ({} if options.nvme_path else without),
        )

    def look(self, command: Sequence[str], machine: Machine) -> Script:
        """Nothing runs on a simulated machine."""
        raise UsageError("--launcher simulated runs nothing, so it cannot try a script; name a MODEL instead.")

    def introduce(self) -> None:
        """Say that nothing is measured."""
        answered = f"a simulator of the machine {self.paper_name} answers each trial and the proof"
        self._tell(Note(f"Simulated: {answered}, and no GPU runs."))

    def techniques(self, choices: TechniqueChoices, workload: Workload, machine: Machine) -> list[Technique]:
        """Only those that were asked for."""
        return techniques_tried(choices, workload, machine.device, on_paper=True)

    @contextmanager
    def opened(self, machine: Machine, workload: Workload, rungs: Sequence[Rung], run_dir: Path) -> Iterator[OpenVenue]:
        """`machine` is the simulated machine, limited to what the user allows."""
        launcher = SimulatedLauncher(self._simulated, model=workload.model, cancelled=self._cancelled)
        with closing(launcher):
            yield OpenVenue(machine=machine, launcher=launcher, clock=launcher.now)

    def signed(self, answer: Answer, machine: Machine) -> Answer:
        """With warnings that it is simulated."""
        return said_to_be_simulated(answer, self.paper_name)

    def close(self) -> None:
        """Nothing to end."""


def job_of(workload: Workload) -> dict[str, Any]:
    """What a trial server imports for it."""
    if workload.script is None:
        # peft asks once whether bitsandbytes is there, which a rank with quantised weights has to answer anew.
        adapters = ["peft"] if workload.lora is not None and workload.load_in is None else []
        known = {"model_config": dict(workload.model.config), "task": workload.task}
        return {**known, "preload": adapters}
    more = {"preload": ["ladder.trial.script.running"], PRELOAD_IF_THERE: list(workload.script.facts.modules)}
    return {"model_config": None, "task": workload.task, **more}


def _paper_machine(options: TuneOptions) -> SimulatedMachine:
    """UsageError if no machine is named, or if an option has no effect on a simulated one."""
    if options.machine is None:
        raise UsageError("--launcher simulated needs a --machine, such as a100-80 or a machine file.")
    for name, value in (
        ("--cold", options.cold),
        ("--wait", options.wait),
        ("--save-weights", options.save_weights),
        ("--nodes", options.nodes),
        ("--hostfile", options.hostfile),
    ):
        if value:
            raise UsageError(f"{name} has no effect with --launcher simulated, which runs no trials; leave it out.")
    if options.gpus == 0:
        raise UsageError("--gpus 0 asks for CPU ranks, and simulated machines have GPUs; leave out --gpus 0.")
    simulated = read_machine(options.machine)
    if options.nvme_path is not None and not simulated.nvme_space:
        raise UsageError(f"--nvme-path: the machine {simulated.name} has no NVMe drive (nvme_space); leave it out.")
    return simulated
