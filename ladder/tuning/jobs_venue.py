"""Slurm jobs that ladder submits, as the place of a tune's trials."""

from __future__ import annotations

from ladder.errors import UsageError
from ladder.launch.jobs.job import Asked
from ladder.launch.jobs.launcher import Jobs, JobsLauncher
from ladder.launch.nodes.launcher import NodesLauncher
from ladder.tuning.job_options import mem_of, more_of
from ladder.tuning.nodes_venue import OnNodes, Opened, Reached, gpus_of_a_node, shared_folder, wanted_of
from ladder.tuning.options import TuneOptions
from ladder.tuning.tune_events import noting

_TIME = "01:00:00"
"""The time limit of a job without --time. Chosen: most partitions allow it, and a tune takes less."""


class OnJobs(OnNodes):
    """Ranks on the nodes of jobs. The command itself runs on a login node."""

    def _reached(self) -> Reached:
        options, nodes = self._options, self._options.nodes or 1
        self._jobs = Jobs(
            _asked(options),
            wanted_of(options, nodes, None),
            shared_folder(options) / "jobs",
            trials=options.trials_per_job,
            queued=options.queued_jobs,
            note=noting(self._tell),
            cancelled=self._cancelled,
        )
        return self._jobs

    def _launcher(self, opened: Opened, ranks: int) -> NodesLauncher:
        return JobsLauncher(self._jobs, opened, ranks=ranks, cancelled=self._cancelled)


def _asked(options: TuneOptions) -> Asked:
    """UsageError for options that do not go with jobs."""
    if options.hostfile is not None:
        raise UsageError("--launcher slurm-jobs has the nodes that Slurm gives; leave --hostfile out.")
    if options.wait:
        raise UsageError("--wait has no effect with --launcher slurm-jobs: jobs wait in the queue; leave it out.")
    if options.gpus is None and options.gpus_per_node is None:
        raise UsageError(
            "--launcher slurm-jobs has to ask Slurm for GPUs: add --gpus, which counts those of all nodes together (0 "
            "trains on the CPU)."
        )
    nodes = options.nodes or 1
    gpus = gpus_of_a_node(options.gpus, nodes) if options.gpus else 0
    return Asked(
        nodes=nodes,
        time=options.time or _TIME,
        account=options.account,
        partition=options.partition,
        mem=mem_of(options, options.host_memory, nodes) or None,
        cpus_per_task=options.cpus_per_task,
        gpus_per_node=options.gpus_per_node or (str(gpus) if gpus else None),
        more=more_of(options),
    )
