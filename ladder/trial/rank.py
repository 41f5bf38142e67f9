"""One rank of one trial: process group, model, engine, then each candidate in turn; every ending is reported."""

from __future__ import annotations

import datetime
import os
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from ladder.protocol import CandidateSpec, DoneEvent, FailedEvent, MeasuredEvent, TrialSpec
from ladder.trial.failure import bytes_asked, classify
from ladder.trial.gauge import Gauge, make_gauge
from ladder.trial.model import build_model, make_optimizer, set_checkpointing
from ladder.trial.report import Reporter, now
from ladder.trial.steps import Stepper

# The controller ends a silent trial long before; this only keeps torch from ending a slow one.
_COLLECTIVE_TIMEOUT = datetime.timedelta(hours=2)


def run_rank(spec: TrialSpec, rank: int, port: int, listen_fd: int | None) -> int:
    """Run rank `rank`; returns its exit status. Rank 0 gets the listening socket that the rendezvous is served on."""
    reporter = Reporter(Path(spec.folder) / f"rank{rank}.jsonl")
    gauge: Gauge | None = None
    try:
        reporter.phase("process_group")
        gauge = make_gauge(spec.device, spec.gpu_uuids[rank] if spec.gpu_uuids else None)
        _join(spec, rank, port, listen_fd)
        gauge.start(spec.memory_limit)
        _measure_all(spec, reporter, gauge)
    except BaseException as error:
        reporter.send(_failure(error, spec, reporter, gauge))
        traceback.print_exc()
        return 1
    reporter.send(DoneEvent(t=now()))
    return 0


def _join(spec: TrialSpec, rank: int, port: int, listen_fd: int | None) -> None:
    world_size = str(spec.world_size)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=world_size,
        LOCAL_WORLD_SIZE=world_size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if spec.device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it without declaring so
        "127.0.0.1", port, spec.world_size, rank == 0, datetime.timedelta(seconds=60), master_listen_fd=listen_fd
    )
    backend = "nccl" if spec.device == "cuda" else "gloo"
    device_id = torch.device("cuda", rank) if spec.device == "cuda" else None
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=spec.world_size, timeout=_COLLECTIVE_TIMEOUT, device_id=device_id
    )
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    # The first collective makes the communicator claim its memory before the limit is set.
    dist.all_reduce(torch.zeros(1, device=spec.device))


def _measure_all(spec: TrialSpec, reporter: Reporter, gauge: Gauge) -> None:
    reporter.phase("model")
    model = build_model(spec)
    vocab_size = model.config.vocab_size
    reporter.phase("engine")
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(spec, model), config=spec.deepspeed)
    stepper = Stepper(engine, spec, reporter, vocab_size)
    for index, candidate in enumerate(spec.candidates):
        if index > 0 and spec.stop_at is not None and stepper.agree(now() > spec.stop_at):
            break
        reporter.candidate = candidate.key
        set_checkpointing(model, candidate.gradient_checkpointing)
        reporter.send(_measure(spec, candidate, stepper, reporter, gauge, first=index == 0))
    reporter.phase("teardown")


def _measure(
    spec: TrialSpec, candidate: CandidateSpec, stepper: Stepper, reporter: Reporter, gauge: Gauge, *, first: bool
) -> MeasuredEvent:
    reporter.phase("warmup")
    gauge.reset()
    losses = stepper.warm_up(candidate, spec.steps.warmup + first)
    gauge.settle()
    reporter.phase("measure")
    began = now()
    timings = stepper.time(candidate, spec.steps)
    ended = now()
    if spec.proof:
        _prove(spec, candidate, stepper, reporter)
    reading = gauge.read()
    return MeasuredEvent(
        t=ended,
        candidate=candidate.key,
        began=began,
        accumulate_seconds=timings.accumulate,
        boundary_seconds=timings.boundary,
        skipped_steps=timings.skipped,
        peak_allocated=reading.allocated,
        peak_reserved=reading.reserved,
        peak_device=reading.device,
        outside_torch=reading.outside_torch,
        peak_host=reading.host,
        alloc_retries=reading.alloc_retries,
        losses=losses + timings.losses,
    )


def _prove(spec: TrialSpec, candidate: CandidateSpec, stepper: Stepper, reporter: Reporter) -> None:
    reporter.phase("evaluation")
    stepper.evaluate(candidate.micro_batch)
    reporter.phase("gather")
    stepper.gather(spec.save_folder)


def _failure(error: BaseException, spec: TrialSpec, reporter: Reporter, gauge: Gauge | None) -> FailedEvent:
    outcome, consequence = classify(error, spec.device)
    return FailedEvent(
        t=now(),
        candidate=reporter.candidate,
        outcome=outcome,
        moment=reporter.moment,
        message=f"{type(error).__name__}: {error}"[:2000],
        bytes_asked=bytes_asked(error),
        bytes_free=_quietly(gauge.free) if gauge else None,
        consequence=consequence,
        traceback="".join(traceback.format_exception(error))[-6000:],
    )


def _quietly(read: Any) -> int | None:
    """A dying CUDA context may refuse even to be asked; the report matters more than this figure."""
    try:
        return int(read())
    except Exception:
        return None
