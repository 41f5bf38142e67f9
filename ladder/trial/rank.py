"""One rank of one trial: process group, model, engine, then one candidate after another. It reports how it ends."""

from __future__ import annotations

import datetime
import faulthandler
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ladder.events.protocol import UNREPORTED, DoneEvent, FailedEvent, ProtectedEvent, TrialSpec
from ladder.trial.backends import backend_of
from ladder.trial.failure import bytes_asked, classify
from ladder.trial.gauge import Gauge, make_gauge
from ladder.trial.measuring import measure_all
from ladder.trial.model import build_model
from ladder.trial.protection import level
from ladder.trial.reporter import Reporter, now
from ladder.trial.staying import Line, can_stay, log_to
from ladder.trial.store import store_at
from ladder.trial.subject import RandomModel
from ladder.trial.techniques import techniques_of

# Long, so that torch does not end a slow trial; the controller ends a silent one much earlier.
_COLLECTIVE_TIMEOUT = datetime.timedelta(hours=2)
_FIRST_ELEMENTS = 4 << 20
"""Of the first collectives. Chosen: 16 MiB, large enough that NCCL allocates the buffers that it needs for ZeRO's
buckets."""


def run_rank(spec: TrialSpec, rank: int, port: int, listen_fd: int | None, line: Line) -> int:
    """Run rank `rank`; returns its exit status. Rank 0 gets the listening socket on which it serves the rendezvous.

    `rank` counts over all nodes. After a clean end the rank may stay, and run the trials that `line` names.
    """
    faulthandler.enable()  # a segmentation fault leaves its stack in the rank's log
    ending = _Ending(spec, rank)
    try:
        ending.reporter.phase("process_group")
        uuid = spec.gpu_uuids[spec.local_ranks.index(rank)] if spec.gpu_uuids else None
        gauge = ending.gauge = make_gauge(spec.device, uuid)
        _join(spec, rank, port, listen_fd)
        if spec.script is not None:
            from ladder.trial.script.running import train_script

            ending.reporter.send(ProtectedEvent(t=now(), level=level.entered()))
            train_script(spec, spec.script, ending.reporter, gauge, ending.leave)
            return ending.report()
        if spec.generation is not None:
            from ladder.trial.generating import generate_all

            generate_all(spec, spec.generation, ending.reporter, gauge)
            return ending.report()
        _train_model(spec, ending.reporter, gauge)
        while can_stay(spec, gauge):
            ending.report()
            following = line.next_trial()
            if following is None:
                return 0
            ending.reporter.close()
            log_to(following.folder, rank)
            print(f"ladder: this process ran trial {spec.trial} before", flush=True)
            spec, ending = following, _Ending(following, rank, gauge)
            ending.reporter.phase("process_group")
            _train_model(spec, ending.reporter, gauge)
    except BaseException as error:
        return ending.report(error)
    return ending.report()


class _Ending:
    """How a rank ends, which is reported whatever happens."""

    def __init__(self, spec: TrialSpec, rank: int, gauge: Gauge | None = None) -> None:
        self._spec, self.gauge = spec, gauge
        self.reporter = Reporter(Path(spec.folder) / f"rank{rank}.jsonl")

    def report(self, error: BaseException | None = None) -> int:
        """Say that all is done, or what `error` means; returns the exit status."""
        if error is None:
            self.reporter.send(DoneEvent(t=now()))
            return 0
        free = _quietly(self.gauge.free) if self.gauge else None
        if self.gauge:
            self.gauge.lift()
        try:
            self.reporter.send(failure_event(error, self._spec, self.reporter, free))
            traceback.print_exception(error)
        except OSError:  # the disk of the run folder is full, so the log cannot be written either
            return UNREPORTED
        return 1

    def leave(self, error: BaseException | None = None) -> NoReturn:
        """End the process here and now: no line of a user's script runs after it."""
        status = self.report(error)
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _join(spec: TrialSpec, rank: int, port: int, listen_fd: int | None) -> None:
    local_rank, num_local = spec.local_ranks.index(rank), len(spec.local_ranks)
    address = spec.share.address if spec.share is not None else "127.0.0.1"
    os.environ.update(spec.environment)
    for technique in techniques_of(spec):
        technique.claim_host(local_rank, num_local)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_WORLD_SIZE=str(num_local),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    if spec.device == "cuda":
        # CUDA starts sooner if a process sees only its own GPU; NCCL finds the others anyway. A rank that is alone sees
        # all of the trial, over which it may lay a model's layers.
        seen = spec.gpu_uuids[local_rank : local_rank + 1] if spec.world_size > 1 else spec.gpu_uuids
        os.environ.update(CUDA_VISIBLE_DEVICES=",".join(seen), LOCAL_RANK="0")
    if spec.script is not None and spec.script.mode == "look":
        from ladder.trial.script.alone import stand_for

        os.environ.update(spec.environment)  # the number of ranks that the training will have
        stand_for(int(os.environ["WORLD_SIZE"]))
        return
    backend = backend_of(spec)
    device = torch.device("cuda", 0) if spec.device == "cuda" else None
    if device is not None:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    store = store_at(address, port, spec.world_size, listen_fd if rank == 0 else None, seconds=60)
    dist.init_process_group(
        backend.collectives(spec),
        store=store,
        rank=rank,
        world_size=spec.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=device,
    )
    backend.join(spec)
    _claim_buffers(spec)
    for technique in techniques_of(spec):
        technique.prepare()


def _claim_buffers(spec: TrialSpec) -> None:
    """Run each collective that ZeRO uses once, so that NCCL allocates its buffers before the limit is set."""
    shard = torch.zeros(_FIRST_ELEMENTS // spec.world_size, device=spec.device)
    whole = torch.zeros(shard.numel() * spec.world_size, device=spec.device)
    dist.all_reduce(whole)
    if spec.device == "cuda":
        dist.all_gather_into_tensor(whole, shard)
        dist.reduce_scatter_tensor(shard, whole)
        torch.cuda.synchronize()
        del shard, whole
        torch.cuda.empty_cache()


def _train_model(spec: TrialSpec, reporter: Reporter, gauge: Gauge) -> None:
    """Measure the candidates on a model with random weights, of which nothing is left then."""
    gauge.start(spec.memory_limit)
    reporter.phase("model")
    backend = backend_of(spec)
    model = build_model(spec, backend.weights_type(spec), backend.build_device(spec))
    reporter.phase("engine")
    training = backend.start(model, spec)
    measure_all(spec, RandomModel(model, training, spec, reporter), reporter, gauge)
    if spec.may_stay:
        backend.let_go(training)


def failure_event(error: BaseException, spec: TrialSpec, reporter: Reporter, free: int | None) -> FailedEvent:
    """What `error` says of the trial, for its file."""
    outcome, consequence = classify(error, spec.device)
    return FailedEvent(
        t=now(),
        candidate=reporter.candidate,
        outcome=outcome,
        moment=reporter.moment,
        message=_writable(_said_by(error)[:2000]),
        bytes_asked=bytes_asked(error),
        bytes_free=free,
        consequence=consequence,
        traceback=_writable("".join(traceback.format_exception(error))[-6000:]),
    )


def _said_by(error: BaseException) -> str:
    """With its type, unless it is a sentence of ours, and with what the script's protection has to do with it."""
    said = str(error) if getattr(error, "is_sentence", False) else f"{type(error).__name__}: {error}"
    return f"{said}: {remark}" if (remark := level.remark(error)) else said


def _writable(text: str) -> str:
    """A message may hold surrogates (from file names that cannot be decoded), which JSON cannot encode."""
    return text.encode(errors="replace").decode()


def _quietly(read: Any) -> int | None:
    """After an error CUDA may refuse even this query; the report matters more than the figure."""
    try:
        return int(read())
    except Exception:
        return None
