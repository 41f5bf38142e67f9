"""A simulated machine as the place of a tune's trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Rung, Technique
from ladder.emit import Answer
from ladder.errors import UsageError
from ladder.machine.described import Machine
from ladder.options.technique_choices import TechniqueChoices, techniques_tried
from ladder.simulation.launcher import SimulatedLauncher
from ladder.simulation.paper_machine import SimulatedMachine, read_machine
from ladder.tuning.answering import said_to_be_simulated
from ladder.tuning.tune_events import Note, Subscriber
from ladder.tuning.venues.base import OpenVenue, Venue
from ladder.workload.script import Script
from ladder.workload.workload import Workload

if TYPE_CHECKING:
    from ladder.options.tune import TuneOptions


class OnPaper(Venue):
    """A simulated machine: no processes, no waiting, and no libraries needed."""

    def __init__(
        self, simulated: SimulatedMachine, options: TuneOptions, tell: Subscriber, cancelled: Callable[[], bool]
    ) -> None:
        self._simulated, self._options = simulated, options
        self._tell, self._cancelled = tell, cancelled
        self.paper_name, self.laws = simulated.name, simulated.model_dump()

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

    def look(self, command: Sequence[str], machine: Machine, note: Callable[[str], None]) -> Script:
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

    def signed(self, answer: Answer) -> Answer:
        """With warnings that it is simulated."""
        return said_to_be_simulated(answer, self._simulated.name)


def paper_machine(options: TuneOptions) -> SimulatedMachine:
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
    if options.dtype == "fp32":
        raise UsageError("--dtype fp32 cannot be simulated; leave it out, or ask `ladder plan` what fits.")
    if options.gpus == 0:
        raise UsageError("--gpus 0 asks for CPU ranks, and simulated machines have GPUs; leave out --gpus 0.")
    simulated = read_machine(options.machine)
    if options.nvme_path is not None and not simulated.nvme_space:
        raise UsageError(f"--nvme-path: the machine {simulated.name} has no NVMe drive (nvme_space); leave it out.")
    return simulated
