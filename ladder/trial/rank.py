"""One rank of one trial: process group, model, engine, then one candidate after another. It reports how it ends."""

from __future__ import annotations

import datetime
import faulthandler
import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ladder.events.protocol import UNREPORTED, CandidateSpec, DoneEvent, FailedEvent, MeasuredEvent, TrialSpec
from ladder.trial.backends import backend_of
from ladder.trial.failure import bytes_asked, classify
from ladder.trial.gauge import Gauge, make_gauge
from ladder.trial.model import build_model, set_checkpointing
from ladder.trial.reporter import Reporter, now
from ladder.trial.steps import Stepper
from ladder.trial.techniques import techniques_of

# Long, so that torch does not end a slow trial; the controller ends a silent one much earlier.
_COLLECTIVE_TIMEOUT = datetime.timedelta(hours=2)
_FIRST_ELEMENTS = 4 << 20
"""Of the first collectives. Chosen: 16 MiB, large enough that NCCL allocates the buffers that it needs for ZeRO's
buckets."""


def run_rank(spec: TrialSpec, rank: int, port: int, listen_fd: int | None) -> int:
    """Run rank `rank`; returns its exit status. Rank 0 gets the listening socket on which it serves the rendezvous."""
    faulthandler.enable()  # a segmentation fault leaves its stack in the rank's log
    reporter = Reporter(Path(spec.folder) / f"rank{rank}.jsonl")
    gauge: Gauge | None = None
    try:
        reporter.phase("process_group")
        gauge = make_gauge(spec.device, spec.gpu_uuids[rank] if spec.gpu_uuids else None)
        _join(spec, rank, port, listen_fd)
        gauge.start(spec.memory_limit)
        _measure_all(spec, reporter, gauge)
        reporter.send(DoneEvent(t=now()))
    except BaseException as error:
        free = _quietly(gauge.free) if gauge else None
        if gauge:
            gauge.lift()
        try:
            reporter.send(_failure(error, spec, reporter, free))
            traceback.print_exc()
        except OSError:  # the disk of the run folder is full, so the log cannot be written either
            return UNREPORTED
        return 1
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
        # CUDA starts sooner if a process sees only its own GPU; NCCL finds the others anyway.
        os.environ.update(CUDA_VISIBLE_DEVICES=spec.gpu_uuids[rank], LOCAL_RANK="0")
    backend, device = ("nccl", torch.device("cuda", 0)) if spec.device == "cuda" else ("gloo", None)
    clock = _Clock()
    if device is not None:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        clock.lap("context")
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it without declaring so
        "127.0.0.1", port, spec.world_size, rank == 0, datetime.timedelta(seconds=60), master_listen_fd=listen_fd
    )
    clock.lap("store")
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=spec.world_size, timeout=_COLLECTIVE_TIMEOUT, device_id=device
    )
    clock.lap("init_process_group")
    backend_of(spec).join(spec)
    clock.lap("backend")
    _claim_buffers(spec)
    clock.lap("first collectives")
    for technique in techniques_of(spec):
        technique.prepare()
    clock.lap("optimizer")


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


class _Clock:
    """Writes to the rank's log how long each part of `_join` took."""

    def __init__(self) -> None:
        self._last = now()

    def lap(self, what: str) -> None:
        time_now = now()
        print(f"ladder: {what} {time_now - self._last:.3f} s", flush=True)
        self._last = time_now


def _measure_all(spec: TrialSpec, reporter: Reporter, gauge: Gauge) -> None:
    reporter.phase("model")
    model = build_model(spec)
    vocab_size = model.config.vocab_size
    reporter.phase("engine")
    training = backend_of(spec).start(model, spec)
    stepper = Stepper(training, spec, reporter, vocab_size)
    first_seconds = 0.0  # the same on all ranks, so all skip the same candidates
    for index, candidate in enumerate(spec.candidates):
        if index > 0 and spec.stop_at is not None and stepper.agree(now() > spec.stop_at):
            break
        if candidate.is_left_out(first_seconds):
            continue
        reporter.candidate = candidate.key
        set_checkpointing(model, candidate)
        measured = _measure(spec, candidate, stepper, reporter, gauge, first=index == 0)
        reporter.send(measured)
        first_seconds = first_seconds or measured.step_seconds(candidate.accumulation)
    reporter.phase("teardown")


def _measure(
    spec: TrialSpec, candidate: CandidateSpec, stepper: Stepper, reporter: Reporter, gauge: Gauge, *, first: bool
) -> MeasuredEvent:
    reporter.phase("warmup")
    gauge.reset()
    losses = stepper.warm_up(candidate, spec.steps.warmup)
    narrower = gauge.settle()
    if narrower:
        gauge.reset()  # memory reserved under the old, higher limit must not count
    if stepper.agree(narrower) or (first and not stepper.is_hopeless(candidate)):
        # One more untimed step: reserving memory again takes time, and so did creating Adam's states in the first one.
        losses += stepper.warm_up(candidate, 1)
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


def _failure(error: BaseException, spec: TrialSpec, reporter: Reporter, free: int | None) -> FailedEvent:
    outcome, consequence = classify(error, spec.device)
    return FailedEvent(
        t=now(),
        candidate=reporter.candidate,
        outcome=outcome,
        moment=reporter.moment,
        message=_writable(f"{type(error).__name__}: {error}"[:2000]),
        bytes_asked=bytes_asked(error),
        bytes_free=free,
        consequence=consequence,
        traceback=_writable("".join(traceback.format_exception(error))[-6000:]),
    )


def _writable(text: str) -> str:
    """A message may hold surrogates (from file names that cannot be decoded), which JSON cannot encode."""
    return text.encode(errors="replace").decode()


def _quietly(read: Any) -> int | None:
    """After an error CUDA may refuse even this query; the report matters more than the figure."""
    try:
        return int(read())
    except Exception:
        return None
