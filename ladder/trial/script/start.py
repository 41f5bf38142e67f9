"""One rank of the user's own training, with the settings of an answer: `python -m ladder.trial.script.start SPEC`.

torchrun starts it, once for each GPU. The script is run unchanged; what it trains with is the answer's. A rank that
fails leaves its reason beside SPEC, as the ranks of trials do.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ladder.events.as_json import from_json
from ladder.events.protocol import ScriptSpec, TrialSpec
from ladder.trial.gauge import CpuGauge, data_bytes, limit_data, limit_torch, tell_deepspeed
from ladder.trial.operators import load
from ladder.trial.rank import failure_event
from ladder.trial.reporter import Reporter
from ladder.trial.script.hold import name_moments, note_checkpoints
from ladder.trial.script.planned import report_loop
from ladder.trial.script.program import program_of
from ladder.trial.script.running import run_program, take_hold
from ladder.trial.techniques import techniques_of


def main() -> None:
    """Run the script of the specification that the command names; what it raises is reported and raised again."""
    path = Path(sys.argv[1])
    spec = from_json(TrialSpec, path.read_bytes())
    assert spec.script is not None
    for technique in techniques_of(spec):
        technique.claim_host(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    reporter = Reporter(path.parent / f"rank{os.environ['RANK']}.jsonl")
    is_ours = spec.device == "cpu" and not dist.is_initialized()
    if is_ours:  # DeepSpeed on a CPU looks for MPI otherwise
        dist.init_process_group("gloo")
    _load_operators(spec)
    program = program_of(spec.script.command)
    reporter.moment = "the script"
    try:
        grip = take_hold(spec, spec.script, program, reporter, CpuGauge(), _never)
        name_moments(grip)
        note_checkpoints(grip)
        if spec.memory_limit:
            limit_run(spec, spec.script)
        try:
            run_program(program, spec, spec.script)
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
        report_loop(grip)
        if is_ours:  # gloo's threads, left to the interpreter's end, now and then abort it
            gc.collect()  # what is left of the script's model holds the group, also one that the script destroyed
            if dist.is_initialized():
                dist.destroy_process_group()
    except SystemExit:
        raise
    except BaseException as error:
        if spec.memory_limit:
            lift_limit(spec)
        reporter.send(failure_event(error, spec, reporter, None))
        raise


def limit_run(spec: TrialSpec, script: ScriptSpec) -> None:
    """Limit this process to what the tune allowed a rank, from now on. It may run for days, and nothing watches it.

    On a GPU, what lies outside torch is what it was in the proof. NVML, which trials ask, counts the memory of all
    processes on the GPU, and in a long training others come and go.
    """
    if spec.device == "cpu":
        limit_data(data_bytes() + spec.memory_limit)
        return
    room = script.torch_limit
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # otherwise each rank has a context on the first GPU too
    limit_torch(room)
    tell_deepspeed(lambda: max(0, room - torch.cuda.memory_allocated()))


def lift_limit(spec: TrialSpec) -> None:
    """Remove the limit, so that a rank that came to it can still report. torch's allocator is not needed for that."""
    if spec.device == "cpu":
        limit_data(resource.RLIM_INFINITY)


def _load_operators(spec: TrialSpec) -> None:
    """Those that the engine will load, one rank after another: a lock that a killed run left would hold it for ever."""
    names = ["shm_comm"] if spec.device == "cpu" and spec.uses_deepspeed else []
    if "offload_optimizer" in spec.deepspeed.get("zero_optimization", {}):
        names.append("cpu_adam")
    for name in names:
        with suppress(Exception):  # the engine says better what it needs
            load(name)


def _never(error: BaseException | None) -> NoReturn:
    raise error or SystemExit


if __name__ == "__main__":
    main()
