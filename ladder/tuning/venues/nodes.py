"""Several nodes as the place of a tune's trials: those of a Slurm job, or of a hostfile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.candidates import Rung
from ladder.errors import UsageError
from ladder.events.protocol import RUN_MARKER
from ladder.launch.base import Launcher
from ladder.launch.nodes.cluster import Cluster, Wanted
from ladder.launch.nodes.connection import Node
from ladder.launch.nodes.hostfile import hostfile_nodes
from ladder.launch.nodes.launcher import NodesLauncher
from ladder.launch.nodes.ray_cluster import ray_nodes
from ladder.launch.nodes.slurm import is_in_allocation, slurm_nodes
from ladder.launch.rank_environment import environment_of_trials, without_gpus
from ladder.launch.sweep import run_marker
from ladder.machine.described import Machine
from ladder.machine.lease import Leases
from ladder.runs.history import make_private
from ladder.tuning.obstacles import with_obstacles
from ladder.tuning.operators import Operators, operators_of_every_trial
from ladder.tuning.script_look import look_at
from ladder.tuning.tune_events import Note, Subscriber, noting
from ladder.tuning.venues.base import OpenVenue
from ladder.tuning.venues.here import ThisHost, job_of
from ladder.workload.script import Script
from ladder.workload.workload import Workload

if TYPE_CHECKING:
    from ladder.options.tune import TuneOptions


class OnNodes(ThisHost):
    """Ranks on several nodes, as many on each. The command itself runs on one of them, or where they can be reached."""

    looks_again = False  # the agents end with the trials

    def __init__(self, options: TuneOptions, leases: Leases, tell: Subscriber, cancelled: Callable[[], bool]) -> None:
        super().__init__(options, leases, tell, cancelled)

        def waited(seconds: float) -> None:
            leases.waited += seconds

        self._cluster = cluster_of(options, cancelled, noting(tell), waited)

    def machine(self) -> Machine:
        """All nodes as one machine, of which the smallest node decides."""
        machine = self._cluster.machine()
        count = machine.world_size // machine.num_nodes
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        self._tell(Note(f"Nodes: {', '.join(self._cluster.names)}, with {ranks} each."))
        return machine

    def look(self, command: Sequence[str], machine: Machine, note: Callable[[str], None]) -> Script:
        """It runs up to the beginning of its training, on the first node alone."""

        @contextmanager
        def launching(
            folder: Path, marker: str, job: Mapping[str, Any], environment: Mapping[str, str]
        ) -> Iterator[Launcher]:
            own = without_gpus(environment)
            # It is not closed: its agent goes on with the trials.
            yield NodesLauncher(
                lambda: self._cluster.first(folder, marker, job, own), ranks=1, cancelled=self._cancelled
            )

        return look_at(command, machine, note, launching, shared_folder(self._options))

    @contextmanager
    def opened(self, machine: Machine, workload: Workload, rungs: Sequence[Rung], run_dir: Path) -> Iterator[OpenVenue]:
        """The agents sweep their nodes before the trials and when they end."""
        marker, job = run_marker(run_dir), job_of(workload)
        environment = without_gpus({**environment_of_trials(machine, workload), RUN_MARKER: marker})
        launcher = NodesLauncher(
            lambda: self._cluster.opened(run_dir, marker, job, environment, cold=self._options.cold),
            ranks=machine.world_size // machine.num_nodes,
            cancelled=self._cancelled,
        )
        always = operators_of_every_trial(workload)
        with closing(self._cluster), closing(launcher):
            operators = Operators(always, workload.optimizer, environment, launcher.load, self._tell, self._cancelled)
            with closing(operators):
                machine = with_obstacles(machine, rungs, workload)
                yield OpenVenue(
                    machine=machine,
                    launcher=launcher,
                    operators=operators,
                    swap_prefix=marker,
                )

    def close(self) -> None:
        """End the agents of nodes."""
        self._cluster.close()


def cluster_of(
    options: TuneOptions,
    cancelled: Callable[[], bool] = lambda: False,
    note: Callable[[str], None] = lambda sentence: None,
    waited: Callable[[float], None] = lambda seconds: None,
) -> Cluster:
    """The nodes that `options` name; see `Cluster`. UsageError or EnvironmentFaultError if there are none."""
    nodes, slots = _nodes(options)
    return Cluster(nodes, wanted_of(options, len(nodes), slots), cancelled, note, waited)


def shared_folder(options: TuneOptions) -> Path:
    """A folder that all nodes see, before the run folder has its name."""
    if options.run_dir is None:
        folder = Path("ladder-runs")
        folder.mkdir(exist_ok=True)
        return folder
    make_private(options.run_dir)
    return options.run_dir


def _nodes(options: TuneOptions) -> tuple[list[Node], int | None]:
    """The nodes, and how many ranks a hostfile wants on each. UsageError outside of both."""
    if options.launcher == "ray":
        if options.hostfile is not None:
            raise UsageError("--launcher ray has the nodes of its cluster; leave --hostfile out.")
        count = options.nodes or 1
        return ray_nodes(count, gpus_of_a_node(options.gpus, count) if options.gpus is not None else None), None
    if options.hostfile is not None:
        return hostfile_nodes(options.hostfile, options.nodes)
    if not is_in_allocation():
        raise UsageError(
            "--nodes is for a Slurm job, and this is none; start it with salloc or sbatch, or name the hosts with "
            "--hostfile."
        )
    assert options.nodes is not None  # `venue_of` asks
    return slurm_nodes(options.nodes), None


def gpus_of_a_node(gpus: int, count: int) -> int:
    """UsageError if `gpus` cannot be divided evenly over `count` nodes."""
    if gpus % count:
        raise UsageError(
            f"--gpus {gpus} cannot be divided evenly over {count} nodes; it counts the GPUs of all nodes together: use "
            f"--gpus {max(count, gpus // count * count)}."
        )
    return gpus // count


def wanted_of(options: TuneOptions, count: int, slots: int | None) -> Wanted:
    """What of each node is used; `slots` is what a hostfile says of a node's GPUs."""
    return Wanted(
        gpus=gpus_of_a_node(options.gpus, count) if options.gpus is not None else slots,
        gpu_memory=options.gpu_memory,
        host_memory=options.host_memory // count if options.host_memory is not None else None,
        nvme_path=options.nvme_path.resolve() if options.nvme_path is not None else None,
        wait=options.wait,
    )
