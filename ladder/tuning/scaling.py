"""`ladder scale`: the best configuration at each number of GPUs, measured as far as there are GPUs, else predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.errors import EnvironmentFaultError, NothingFitsError, UsageError
from ladder.events.outcome import Record
from ladder.launch.counting import counting
from ladder.machine.described import Gpu, Machine, bare_machine
from ladder.machine.environment import ranks_in
from ladder.machine.gpus import visible_gpus
from ladder.machine.interpreter import version_of
from ladder.report.scale_points import ScalePoint, ScaleResult, with_prices
from ladder.report.writing import write_scale
from ladder.runs.stored_run import StoredRun, read_run
from ladder.search.forecast import num_nodes
from ladder.search.policy import answer, faster_without_deepspeed
from ladder.search.scaling import Scaling
from ladder.search.space import Space
from ladder.simulation.paper_machine import SimulatedMachine, read_machine
from ladder.text import shown
from ladder.tuning.option_checks import require_workload
from ladder.tuning.options import TuneOptions, WorkloadOptions
from ladder.tuning.precision import dtype_of
from ladder.tuning.problem import (
    make_space,
    micro_batches_of,
    problem_of,
    split_supported,
    what_is_trained,
    workload_of,
)
from ladder.tuning.run import run_tune
from ladder.tuning.scale_options import ScaleOptions, counts_in
from ladder.tuning.technique_choices import TechniqueChoices, techniques_tried, ways_of_checkpointing
from ladder.tuning.tune_events import Subscriber, ignore, noting
from ladder.units import gib
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

_GPUS_OF_A_NODE = 8
"""Chosen: as in most servers for training."""
_BATCH = 128
"""Sequences per optimizer step. Chosen: as in a tune of a number of GPUs that divides it."""
Run = tuple[Space, Sequence[Record]]


def scale_of(
    options: ScaleOptions, tell: Subscriber = ignore, cancelled: Callable[[], bool] = lambda: False
) -> ScaleResult:
    """Tune the counts that are here, and predict the others. NothingFitsError if nothing fits on any of them."""
    with ranks_in(options.python, must_train=False):
        return _scale_of(options, tell, cancelled)


def _scale_of(options: ScaleOptions, tell: Subscriber, cancelled: Callable[[], bool]) -> ScaleResult:
    if options.script or options.map:
        raise UsageError(
            "`ladder scale` compares models, not scripts; name a MODEL, or tune the script at each number."
        )
    require_workload(options)
    counts = counts_in(options.gpus)
    paper = _paper(options)
    stored = _stored(options)
    workload = _workload(options, paper, stored, noting(tell))
    left_out = {count: reason for count in counts if (reason := _undivided(workload, count))}
    wanted = [count for count in counts if count not in left_out]
    if not wanted:
        raise UsageError(f"{next(iter(left_out.values()))} Change --gpus or --global-batch-size.")
    runs = {run.space.world_size: (run.space, run.records) for run in stored}
    real = {count: "simulated" if "simulated machine" in run.facts else "measured" for count, run in _by_count(stored)}
    for count in _counts_here(options, paper, [count for count in wanted if count not in runs]):
        try:
            done = run_tune(_tune_options(options, workload, count), tell, cancelled)
        except NothingFitsError:  # refused before any trial
            continue
        runs[count] = (done.result.space, done.result.records)
        real[count] = "simulated" if paper else "measured"
        if cancelled():
            break
    points = []
    for count in wanted:
        if count in real:
            points.append(_measured(*runs[count], real[count]))
        elif not cancelled():
            points.append(predicted(space_of(options, workload, _machine(options, paper, runs, count)), runs))
    result = _result(options, workload, points, left_out)
    try:
        write_scale(result, options.report)
    except EnvironmentFaultError as error:  # the result is worth more than its page
        noting(tell)(str(error))
    return result


def predicted(space: Space, runs: Mapping[int, Run]) -> ScalePoint:
    """The point of `space` by prediction, from those of `runs` that have fewer GPUs."""
    found = Scaling([run for count, run in runs.items() if count < space.world_size]).best(space)
    point = ScalePoint(gpus=space.world_size, nodes=space.num_nodes, source="none")
    if found is None:
        return point
    return replace(
        point,
        source="predicted",
        candidate=found.outlook.candidate.key,
        tokens_per_second=found.tokens_per_second,
        low=found.low,
        high=found.high,
        device_gib=gib(found.outlook.memory.peak),
        is_sure=found.is_sure,
    )


def _by_count(stored: Sequence[StoredRun]) -> list[tuple[int, StoredRun]]:
    return [(run.space.world_size, run) for run in stored]


def _result(
    options: ScaleOptions, workload: Workload, points: Sequence[ScalePoint], left_out: Mapping[int, str]
) -> ScaleResult:
    if not any(point.tokens_per_second for point in points):
        most = max((point.gpus for point in points), default=0)
        raise NothingFitsError(
            f"Nothing fits on up to {most} GPUs; add larger numbers to --gpus, or see `ladder plan`."
        )
    return ScaleResult(
        model=workload.model.name,
        global_batch_size=workload.global_batch_size,
        price=options.price,
        points=with_prices(points, options.price),
        left_out=left_out,
    )


def _measured(space: Space, records: Sequence[Record], source: str) -> ScalePoint:
    point = ScalePoint(gpus=space.world_size, nodes=space.num_nodes, source=source)
    found = faster_without_deepspeed(records, space.tolerance) or answer(records)
    if found is None or found.measurement is None or not found.tokens_per_second:
        return replace(point, source="none")
    return replace(
        point,
        candidate=found.candidate_key,
        tokens_per_second=found.tokens_per_second,
        device_gib=gib(found.measurement.peak_device),
        joules_per_token=found.joules_per_token,
    )


def _undivided(workload: Workload, count: int) -> str:
    """Why `count` GPUs cannot share the global batch; empty if they can."""
    batch = workload.global_batch_size
    return f"{count} GPUs cannot divide the global batch of {batch} sequences evenly." if batch % count else ""


def _paper(options: ScaleOptions) -> SimulatedMachine | None:
    if options.machine is None:
        if options.launcher == "simulated":
            raise UsageError("--launcher simulated needs a --machine, such as a100-80 or a machine file.")
        return None
    machine = read_machine(options.machine)
    if options.launcher == "simulated" and options.gpus_per_node is not None:
        raise UsageError("--gpus-per-node has no effect with --launcher simulated; change num_gpus of the --machine.")
    if options.launcher != "simulated" and options.trials:
        raise UsageError("--machine names a simulated machine: add --launcher simulated or --no-trials.")
    return machine


def _stored(options: ScaleOptions) -> list[StoredRun]:
    """The runs of `--runs`. UsageError if they differ in what was trained, or on which GPUs."""
    runs = [read_run(folder) for folder in options.runs]
    if len({run.space.world_size for run in runs}) < len(runs):
        raise UsageError("--runs: two runs have the same number of GPUs; name one of them.")
    for folder, run in zip(options.runs, runs, strict=True):
        first = runs[0].space
        for what, is_same in (
            ("workload", run.space.workload.fingerprint() == first.workload.fingerprint()),
            ("GPUs", run.space.gpu_name == first.gpu_name and run.space.memory_limit == first.memory_limit),
        ):
            if not is_same:
                raise UsageError(f"--runs: {shown(folder)} has another {what} than {shown(options.runs[0])}.")
        if run.space.device != "cuda":
            raise UsageError(f"--runs: {shown(folder)} was tuned on the CPU; name runs on GPUs.")
    return runs


def _workload(
    options: ScaleOptions, paper: SimulatedMachine | None, stored: Sequence[StoredRun], note: Callable[[str], None]
) -> Workload:
    """The same for all counts. UsageError if the stored runs trained something else."""
    gpu_name = paper.gpu_name if paper else stored[0].space.gpu_name if stored else None
    model = resolve_model(options.model, task=options.task, count=counting(note))
    batch = options.global_batch_size or (stored[0].space.workload.global_batch_size if stored else _BATCH)
    workload = workload_of(
        model,
        1,
        note,
        count=counting(note),
        task=options.task,
        seq_len=options.seq_len,
        global_batch_size=batch,
        dtype=dtype_of(options.dtype, gpu_name, note),
        optimizer=options.optimizer,
        **what_is_trained(options),
    )
    if stored and stored[0].space.workload.fingerprint() != workload.fingerprint():
        raise UsageError(f"--runs: {shown(options.runs[0])} trained another workload; give the options of its tune.")
    return workload


def _counts_here(options: ScaleOptions, paper: SimulatedMachine | None, counts: Sequence[int]) -> list[int]:
    """Those of `counts` that can be tuned here."""
    if not options.trials:
        return []
    most = None if paper is not None else len(visible_gpus())
    return [count for count in counts if most is None or count <= most]


def _tune_options(options: ScaleOptions, workload: Workload, count: int) -> TuneOptions:
    """The options of the tune of `count` GPUs. Its answer is written into a folder of its own."""
    folder = options.output / f"{count}-gpus"
    folder.mkdir(parents=True, exist_ok=True)
    shared = {each.name: getattr(options, each.name) for each in fields(WorkloadOptions)}
    return TuneOptions(
        **shared | {"global_batch_size": workload.global_batch_size, "dtype": workload.dtype},
        gpus=count,
        gpu_memory=options.gpu_memory,
        launcher=options.launcher,
        machine=options.machine if options.launcher == "simulated" else None,
        time_budget=options.time_budget,
        switches=options.switches,
        allow=options.allow,
        run_dir=folder / "run",
        output=folder / Path("best_config.json"),
    )


def space_of(options: ScaleOptions, workload: Workload, machine: Machine) -> Space:
    """What a tune of `workload` on `machine` would search, without NVMe."""
    choices = TechniqueChoices(switches=options.switches, allow=options.allow)
    supported, _ = split_supported(RUNGS_BY_NAME.values(), machine, workload)
    rungs = [rung for rung in supported if "nvme" not in rung.devices]
    return make_space(
        problem_of(workload, machine),
        rungs,
        micro_batches_of(workload, machine.world_size, None),
        techniques=techniques_tried(choices, workload, "cuda", on_paper=True),
        checkpointing=ways_of_checkpointing(version_of("transformers")),
    )


def _machine(options: ScaleOptions, paper: SimulatedMachine | None, runs: Mapping[int, Run], count: int) -> Machine:
    """`count` GPUs like those of the runs, of the machine on paper, or with the memory that was given."""
    if paper is not None:
        if options.gpus_per_node is not None:
            paper = paper.model_copy(update={"num_gpus": options.gpus_per_node})
        return replace(paper.machine(count, gpu_memory=options.gpu_memory), nvme_path=None)
    nodes = num_nodes(count, options.gpus_per_node or _GPUS_OF_A_NODE)
    if not runs:
        if options.gpu_memory is None:
            raise UsageError("No GPUs to predict for: give --gpu-memory, a --machine, or --runs of earlier tunes.")
        return bare_machine(count, options.gpu_memory, num_nodes=nodes)
    seen, _ = runs[max(runs)]
    limit = options.gpu_memory or seen.memory_limit
    return replace(
        bare_machine(count, limit, num_nodes=nodes),
        gpus=tuple(Gpu("", seen.gpu_name or "", limit) for _ in range(count)),
        host_memory=seen.host_memory // seen.num_nodes * nodes,
        num_cores=max(1, seen.num_cores // seen.num_nodes) * nodes,
        rates=dict(seen.rates),
        learned={name: (mean, deviation) for name, mean, deviation in seen.learned},
    )
