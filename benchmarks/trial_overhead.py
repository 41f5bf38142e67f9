"""How long a trial takes before and after its real work: warm (forked from the trial server) against cold.

    python benchmarks/trial_overhead.py [--device cuda] [--ranks 4] [--repeats 5]

Prints a table and a last line `warm_over_cold=… overhead_seconds=… nodes_over_one=…`:

- warm_over_cold: seconds from the request of a trial until all ranks are ready to build a model, warm over cold
  (medians);
- overhead_seconds: the median seconds of a warm trial outside model construction, engine initialisation and steps;
- nodes_over_one (on the CPU, which divides its ranks): seconds of a whole warm trial whose two ranks are on two nodes,
  which both are this host, over one with both ranks on one node (medians).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.events.protocol import PhaseEvent, TrialSpec
from ladder.events.step_policy import StepPolicy
from ladder.events.trial_run import TrialRun
from ladder.events.verdict import trial_seconds
from ladder.launch.base import Deadlines, Launcher
from ladder.launch.local import LocalLauncher
from ladder.launch.nodes.cluster import Cluster, Wanted
from ladder.launch.nodes.connection import Node
from ladder.launch.nodes.launcher import NodesLauncher
from ladder.launch.operator_builds import build_operators
from ladder.launch.rank_environment import rank_environment
from ladder.machine.described import Machine
from ladder.machine.machine import detect_machine
from ladder.tuning.trial_request import candidate_spec, engine_config, trial_spec
from ladder.workload.shapes import with_layers
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

_WORK = ("model", "engine", "warmup", "measure")


def make_spec(name: str, folder: Path, machine: Machine, workload: Workload) -> TrialSpec:
    candidate = Candidate(Engine(RUNGS_BY_NAME["zero2"]), 1, 1, 1)
    return trial_spec(
        name,
        folder / name,
        workload,
        machine,
        candidate.engine,
        engine_config(workload, [candidate], machine.world_size, None),
        [candidate_spec(candidate)],
        steps=StepPolicy(minimum=2, maximum=2),
    )


def ready_seconds(run: TrialRun) -> float:
    """From the request until the last rank begins to build its model."""
    begins = [
        event.t for events in run.events for event in events if isinstance(event, PhaseEvent) and event.phase == "model"
    ]
    if len(begins) < run.spec.world_size:
        raise RuntimeError(f"trial {run.spec.trial} did not start: see {run.spec.folder}")
    return max(begins) - run.requested


def measure(
    machine: Machine, workload: Workload, folder: Path, repeats: int, *, cold: bool
) -> tuple[list[float], list[float]]:
    """Seconds to ready, and of overhead, of `repeats` trials. A warm server's start is paid once and not counted."""
    kind = "cold" if cold else "warm"
    operators = ["shm_comm"] if machine.device == "cpu" else []
    launcher = LocalLauncher(
        marker=f"ladder-benchmark-{os.getpid()}-{kind}",
        job={"model_config": dict(workload.model.config), "task": workload.task, "operators": operators},
        environment=rank_environment(machine),
        log=folder / f"{kind}.log",
        gpu_uuids=tuple(gpu.uuid for gpu in machine.gpus),
        cold=cold,
    )
    try:
        runs = []
        for index in range(repeats + (not cold)):  # the first warm trial waits for the server's imports
            spec = make_spec(f"{kind}-{index}", folder, machine, workload)
            runs.append(launcher.run(spec, Deadlines(), lambda rank, event: None))
        kept = runs if cold else runs[1:]
    finally:
        launcher.close()
    overheads = [sum(s for phase, s in trial_seconds(run).items() if phase not in _WORK) for run in kept]
    return [ready_seconds(run) for run in kept], overheads


def nodes_over_one(machine: Machine, workload: Workload, folder: Path, repeats: int) -> float:
    """Warm trials of one node and of two, in turn."""
    environment = rank_environment(machine)
    job: dict[str, Any] = {"model_config": dict(workload.model.config), "task": workload.task, "operators": []}
    marker, nodes = f"ladder-benchmark-{os.getpid()}", [Node(name=name, command=list) for name in ("node1", "node2")]
    cluster = Cluster(nodes, Wanted(gpus=0, gpu_memory=None, host_memory=None, nvme_path=None), lambda: False)
    one = LocalLauncher(marker=f"{marker}-one", job=job, environment=environment, log=folder / "one.log")
    two = NodesLauncher(lambda: cluster.opened(folder, f"{marker}-two", job, environment, cold=False), ranks=1)
    seconds: dict[Launcher, list[float]] = {one: [], two: []}
    with closing(one), closing(two), closing(cluster):
        for index in range(repeats + 1):  # the first trials wait for imports
            for launcher, of_launcher in seconds.items():
                spec = make_spec(f"{type(launcher).__name__}-{index}", folder, machine, workload)
                run = launcher.run(spec, Deadlines(), lambda rank, event: None)
                ready_seconds(run)
                of_launcher.append(run.ended - run.requested)
    return statistics.median(seconds[two][1:]) / statistics.median(seconds[one][1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    machine = detect_machine(
        gpus=0 if options.device == "cpu" else options.ranks, gpu_memory=None, host_memory=None, nvme_path=None
    )
    shape = with_layers(resolve_model("tiny-llama"), 2)
    workload = Workload(model=shape, task="causal-lm", seq_len=32, global_batch_size=machine.world_size)
    build_operators(["shm_comm"] if machine.device == "cpu" else [], rank_environment(machine))
    with tempfile.TemporaryDirectory() as folder:
        warm, warm_overhead = measure(machine, workload, Path(folder), options.repeats, cold=False)
        apart = nodes_over_one(machine, workload, Path(folder), options.repeats) if options.device == "cpu" else None
        cold, cold_overhead = measure(machine, workload, Path(folder), max(2, options.repeats // 2), cold=True)
    print(f"{machine.world_size} ranks on {machine.gpu_name or 'CPU'}")
    print(f"{'':6}{'ready (s)':>12}{'overhead (s)':>14}{'trials':>8}")
    for name, ready, overhead in (("warm", warm, warm_overhead), ("cold", cold, cold_overhead)):
        print(f"{name:6}{statistics.median(ready):>12.2f}{statistics.median(overhead):>14.2f}{len(ready):>8}")
    ratio = statistics.median(warm) / statistics.median(cold)
    nodes = f" nodes_over_one={apart:.3f}" if apart is not None else ""
    print(f"warm_over_cold={ratio:.4f} overhead_seconds={statistics.median(warm_overhead):.3f}{nodes}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
