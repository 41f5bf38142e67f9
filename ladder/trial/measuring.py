"""The candidates of a trial, one after another on one engine: untimed steps, timed steps, what was held."""

from __future__ import annotations

from dataclasses import replace

import torch

from ladder.events.protocol import MeasuredEvent, TrialSpec
from ladder.events.step_policy import CandidateSpec
from ladder.trial.gauge import Gauge, Reading
from ladder.trial.model import DTYPES
from ladder.trial.reporter import Reporter, now
from ladder.trial.steps import Stepper, Timings
from ladder.trial.subject import Subject, synchronize
from ladder.trial.techniques import techniques_of
from ladder.workload.modules import Product

_MOST_TOKENS = 8192
"""Of a matrix product that is timed alone. Chosen: with more, the rate of large GPUs no longer rises, and the buffers
stay below 1 GiB."""
_OPERATIONS = {"cuda": 4e12, "cpu": 2e9}
"""Of all repetitions of such a product. Chosen: some 10 ms on a GPU of 400 TFLOP/s, and 50 ms on a CPU core."""


def measure_all(spec: TrialSpec, subject: Subject, reporter: Reporter, gauge: Gauge) -> None:
    """Report what each candidate takes; the one that fails raises what ended it."""
    stepper = Stepper(subject, spec, reporter)
    first_seconds = 0.0  # the same on all ranks, so all skip the same candidates
    for index, candidate in enumerate(spec.candidates):
        if index > 0 and stepper.agree(spec.is_late(now())):
            break
        if candidate.is_left_out(first_seconds):
            continue
        reporter.candidate = candidate.key
        subject.use(candidate)
        event = _measure(spec, candidate, subject, stepper, reporter, gauge, first=index == 0)
        reporter.send(event)
        first_seconds = first_seconds or event.step_seconds(candidate.accumulation)
    reporter.phase("teardown")


def _measure(
    spec: TrialSpec,
    candidate: CandidateSpec,
    subject: Subject,
    stepper: Stepper,
    reporter: Reporter,
    gauge: Gauge,
    *,
    first: bool,
) -> MeasuredEvent:
    reporter.phase("warmup")
    gauge.reset()
    compiles = any(technique.compiles for technique in techniques_of(spec))
    compiling, losses = stepper.compile(candidate) if compiles else (None, [])
    losses += stepper.warm_up(candidate, spec.steps.warmup)
    narrower = gauge.settle()
    if narrower:
        gauge.reset()  # memory reserved under the old, higher limit must not count
    if stepper.agree(narrower) or (first and stepper.needs_one_more(candidate)):
        # One more untimed step: reserving memory again takes time, and so did creating Adam's states in the first one.
        losses += stepper.warm_up(candidate, 1)
    if not subject.is_even:
        losses += stepper.settle_in(candidate)
    reporter.phase("measure")
    began = now()
    timings = stepper.time(candidate, spec.steps)
    ended = now()
    if spec.proof:
        reporter.phase("evaluation")
        subject.evaluate(candidate)
        reporter.phase("gather")
        subject.gather(spec.save_folder)
    event = measured(candidate, gauge.read(), timings, began=began, ended=ended, losses=losses + timings.losses)
    alone = matrix_flops(spec, candidate) if spec.products else None
    return replace(event, compile_seconds=compiling, matrix_flops=alone)


def measured(
    candidate: CandidateSpec, reading: Reading, timings: Timings, *, began: float, ended: float, losses: list[float]
) -> MeasuredEvent:
    """What was measured of `candidate` from `began` to `ended`, on CLOCK_MONOTONIC."""
    new = timings.new_length
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
        peak_host=reading.peak_host,
        held_host=reading.held_host,
        alloc_retries=reading.alloc_retries,
        others=reading.others,
        losses=losses,
        micro_steps=len(timings.steps[0].losses) or None,
        new_length_seconds=new.seconds if new is not None else None,
        new_length_share=new.share if new is not None else None,
    )


def matrix_flops(spec: TrialSpec, candidate: CandidateSpec) -> float | None:
    """Operations per second in the products of the model's matrices, each with its share of the work.

    A product is timed as training has it: for outputs, for gradients of inputs, and for those of weights. None if the
    device has no memory left for them.
    """
    try:
        if spec.device == "cuda":
            torch.cuda.empty_cache()
        tokens = min(candidate.micro_batch * spec.seq_len, _MOST_TOKENS)
        seconds = [_seconds_per_operation(spec, product, tokens) for product in spec.products]
    except torch.OutOfMemoryError:
        return None
    work = [product.count * product.tokens * product.inputs * product.outputs for product in spec.products]
    return sum(work) / sum(each * one for each, one in zip(work, seconds, strict=True))


def _seconds_per_operation(spec: TrialSpec, product: Product, tokens: int) -> float:
    size = product.inputs * product.outputs
    rows = max(1, min(round(tokens * product.tokens), round(_OPERATIONS[spec.device] / 6 / size)))
    shapes = ((rows, product.inputs), (product.inputs, product.outputs), (rows, product.outputs))
    # Random, because a GPU that multiplies ones draws less power and keeps a higher clock.
    inputs, weights, gradients = (torch.randn(shape, dtype=DTYPES[spec.dtype], device=spec.device) for shape in shapes)
    repetitions = max(1, round(_OPERATIONS[spec.device] / (6 * rows * size)))
    seconds = []
    for repeated in (1, repetitions):  # libraries choose their kernels in the first call
        synchronize(spec.device)
        began = now()
        for _ in range(repeated):
            torch.mm(inputs, weights)
            torch.mm(gradients, weights.t())
            torch.mm(inputs.t(), gradients)
        synchronize(spec.device)
        seconds.append((now() - began) / repeated)
    return seconds[-1] / (6 * rows * size)
