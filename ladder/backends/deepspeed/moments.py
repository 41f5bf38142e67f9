"""The bytes of a candidate, by moment and by part, before any correction: the formulae of the memory model.

They are derived from DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, fp16/unfused_optimizer.py) and from
what transformers' blocks save for backward, and were compared with 99 points of a Llama-2-7B shape measured on four
GPUs (tests/data). P is the number of parameters, N the number of ranks, B a bucket's elements.

**What is left out.** Stages 1 and 2 first flatten the parameters into a second copy, 2 P more, on the GPU where the
*GPU* (not the allocator's limit) has room, and on the host where it has not; the moments are without that copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ladder.backends.activations import Activations, activations_of, offloaded_input, terms_of
from ladder.backends.base import Device, Moment
from ladder.backends.deepspeed.config import engine_knobs
from ladder.candidates import Candidate, Terms
from ladder.units import MIB
from ladder.workload.workload import ModelShape, Workload

_WORKSPACE = 64 * MIB
"""Measured: cuBLAS's, seen in every measurement as 0.065 GiB beyond the model states."""
_NORM_PIECE = 250_000_000
"""Elements; defined in DeepSpeed's `stage3._constant_buffered_norm2`."""
_UNFUSED_BUCKET = 500_000_000
"""Elements of stage 0's all-reduce; defined in DeepSpeed's `engine.MEMORY_OPT_ALLREDUCE_SIZE`."""


def moments_of(workload: Workload, candidate: Candidate, world_size: int, device: Device) -> list[Moment]:
    """The moments that can be the fullest; the first is the engine at rest after its first optimizer step."""
    stage = candidate.engine.rung.stage
    build = _moments_replicated if stage == 0 else _moments_stage3 if stage == 3 else _moments_stage12
    moments = build(workload, candidate, activations_of(workload, candidate, world_size), world_size)
    if device == "cpu":
        return _as_on_cpu(moments, offloaded(workload, candidate, world_size)[0] / world_size)
    return [replace(moment, buffers=moment.buffers + _WORKSPACE) for moment in moments]


def _as_on_cpu(moments: Sequence[Moment], on_host: float) -> list[Moment]:
    """What is offloaded stays on the same device, and what forward and backward freed is still held at the step.

    Measured (reference, 34 million parameters): stage 2 takes the step's memory plus 4/3 of activations and logits.
    """
    moments = [replace(moment, optimizer=moment.optimizer + on_host) for moment in moments]
    loss = next(moment for moment in moments if moment.name == "loss")
    late = replace(
        moments[-1],
        activations=loss.activations * 4 / 3,
        logits=loss.logits * 4 / 3,
        buffers=max(moment.buffers for moment in moments),
        live=loss.live,
    )
    return [*moments, late]


def _moments_replicated(workload: Workload, candidate: Candidate, acts: Activations, world_size: int) -> list[Moment]:
    """Stage 0: everything on every GPU (FP16_UnfusedOptimizer, for bf16 too).

    16-bit parameters 2 P, master and states 12 P; gradients 2 P; the step makes fp32 gradients, 4 P, beside them.
    """
    p, terms = workload.model.num_parameters, terms_of(workload, candidate, world_size)
    rest = Moment("initialisation", 2 * p, 0.0, _optimizer_bytes(workload, terms) * p)
    accumulated = 2.0 * p if candidate.accumulation > 1 else 0.0
    reduce_copy = 2.0 * min(p, _UNFUSED_BUCKET) if world_size > 1 else 0.0
    return [
        rest,
        *_forward_and_loss(replace(rest, gradients=accumulated), acts),
        replace(
            rest,
            name="backward",
            gradients=max(accumulated, 2.0 * workload.model.largest_parameter),
            activations=acts.kept + acts.block + acts.tail,
        ),
        replace(rest, name="backward", gradients=2.0 * p, buffers=reduce_copy, activations=acts.block),
        replace(rest, name="step", gradients=6.0 * p),
    ]


def _moments_stage12(workload: Workload, candidate: Candidate, acts: Activations, world_size: int) -> list[Moment]:
    """Stages 1 and 2: parameters on every GPU, optimizer (and at stage 2 gradients) divided by N, or on the host.

    Backward holds one bucket of 2 B elements, two with `overlap_comm`, and copies a full one to reduce it where it
    belongs to several ranks. The step makes of the rank's 2 P/N of gradients a flat copy, 2 P/N, and that in fp32,
    4 P/N: measured 22 bytes a parameter on one GPU. Offload keeps room for the largest gradient on the GPU. At stage 1
    it accumulates all gradients there, takes its own to the host at the boundary, and keeps its buckets until then.
    """
    model, rung = workload.model, candidate.engine.rung
    terms = terms_of(workload, candidate, world_size)
    knobs = engine_knobs(workload, candidate.engine)
    p, share, largest = model.num_parameters, model.num_parameters / world_size, 2.0 * model.largest_parameter
    offload = rung.offload_optimizer != "none"
    rest = Moment(
        "initialisation",
        2 * p,
        0.0,
        0.0 if offload else _optimizer_bytes(workload, terms) * share,
        buffers=largest if offload else 0.0,
    )
    rest_gradients, at_boundary = 0.0, offload and rung.stage == 1
    if candidate.accumulation > 1:
        rest_gradients = 2.0 * p if rung.stage == 1 else 0.0 if offload else 2.0 * share
    bucket = 2.0 * knobs["reduce_bucket_size"]
    if at_boundary and candidate.accumulation == 1 and world_size > 1 and largest > bucket:
        rest_gradients = largest  # smaller ones of other ranks are views of the bucket (reduce_ipg_grads)
    buckets = bucket * (2 if knobs["overlap_comm"] else 1)
    copy = min(bucket, 2.0 * p) if world_size > 1 else 0.0
    own = 0.0 if offload else 2.0 * share  # allocated as the first bucket's copy goes
    norm = 8.0 * min(model.largest_parameter, share) if offload else 0.0
    head = _head_gradient(model, bucket, norm)
    held = rest.buffers + (buckets if at_boundary else 0.0)
    return [
        rest,
        *_forward_and_loss(replace(rest, gradients=rest_gradients, buffers=held), acts),
        *_backward(
            replace(rest, gradients=rest_gradients, buffers=rest.buffers + buckets),
            acts,
            first=max(largest, head - largest) if at_boundary else head,  # there it is one of those accumulated
            waiting=largest if model.tied and rest_gradients < 2.0 * p else 0.0,
            at_reduction=replace(rest, gradients=rest_gradients, buffers=rest.buffers + buckets + max(copy, own)),
            reduced=min(1.0, bucket / (2.0 * p)),
        ),
        replace(rest, name="step", gradients=0.0 if offload else (4.0 + terms.fp32_gradient) * share),
    ]


def _moments_stage3(workload: Workload, candidate: Candidate, acts: Activations, world_size: int) -> list[Moment]:
    """Stage 3: everything divided by N, plus the parameters gathered for the moment.

    Gradients have their own 2 P/N for good (on the host with the optimizer), the bucket its 2 B elements for good.
    Measured: at the loss, parameters are gathered up to `stage3_max_live_parameters`, all of them in a small model. A
    full bucket is copied to be scattered. The step takes sub-groups of the rank's share: 2 + 4 bytes of gradients each.
    """
    model, rung = workload.model, candidate.engine.rung
    terms = terms_of(workload, candidate, world_size)
    knobs = engine_knobs(workload, candidate.engine)
    p, share, part = model.num_parameters, model.num_parameters / world_size, model.largest_parameter / world_size
    on_gpu = rung.offload_optimizer == "none"
    bucket = 2.0 * knobs["reduce_bucket_size"]
    rest = Moment(
        "initialisation",
        2.0 * share if rung.offload_param == "none" else 0.0,
        2.0 * share if on_gpu else 0.0,
        _optimizer_bytes(workload, terms) * share if on_gpu else 0.0,
        buffers=bucket,
    )
    at_least = model.largest_parameter + knobs["stage3_prefetch_bucket_size"]
    cap = max(knobs["stage3_max_live_parameters"], at_least)
    live = 2.0 * (p if p <= cap + model.largest_parameter else cap)  # the last one gathered may go beyond the cap
    if world_size == 1 and rung.offload_param == "none":
        live = 0.0  # nothing to gather: the parameter is its own only partition (measured on one H200)
    later = 2.0 * min(live / 2.0, max(at_least, p - bucket / 2.0))
    full = min(bucket, 2.0 * p)
    group = min(share, knobs["sub_group_size"])
    copies = 2.0 + terms.fp32_gradient
    norm = 0.0 if on_gpu else 8.0 * min(part, _NORM_PIECE)
    return [
        rest,
        *_forward_and_loss(replace(rest, live=live), acts),
        *_backward(
            replace(rest, live=live),
            acts,
            first=_head_gradient(model, bucket, 2.0 * part + norm),
            # Where parameters are gathered, the head's have been given back by then, and make room for it.
            waiting=2.0 * model.largest_parameter if model.tied and not live else 0.0,
            at_reduction=replace(rest, live=later, buffers=bucket + full * (1 + 1 / world_size)),
            reduced=min(1.0, bucket / (2.0 * p)),
        ),
        replace(rest, name="step", gradients=rest.gradients + (copies * group if on_gpu else 0.0)),
    ]


def _forward_and_loss(base: Moment, acts: Activations) -> list[Moment]:
    return [
        # In forward the logits exist in 16 bits, in fp32 and as log-softmax: 10 bytes of the loss's 12.
        replace(base, name="forward", activations=acts.kept + acts.tail, logits=acts.logits * 10 / 12),
        replace(base, name="loss", activations=acts.kept + acts.tail, logits=acts.logits),
    ]


def _head_gradient(model: ModelShape, bucket: float, on_its_way: float) -> float:
    """Bytes of the head's gradient, and of what is made of it `on_its_way` where it is reduced by itself.

    It is where it is larger than the bucket: stage 3 scatters a copy, and where it goes to the host, its norm is taken
    in fp64 (zero.utils.get_norm_dtype), 8 bytes an element more: measured with 152k tokens, 1.7 GiB, the peak where no
    logits are kept and the micro-batch is small. That of a tied head is not whole before the embeddings' is.
    """
    largest = 2.0 * model.largest_parameter
    return largest + (on_its_way if largest > bucket and not model.tied else 0.0)


def _backward(
    base: Moment, acts: Activations, *, first: float, waiting: float, at_reduction: Moment, reduced: float
) -> list[Moment]:
    """Backward's own peaks: its start, a block in the middle, and the reduction of the first full bucket.

    `first` is what the gradient of the head takes, which comes first; a tied head's is `waiting` for that of the
    embeddings, which comes last (measured with long sequences, where the block in the middle is the fullest moment).
    `reduced` is the share of the model whose gradients are in that bucket: about as much of the activations is free by
    then, and half of the block in work is (its point within the block is chance; half was measured on the average).
    """
    left = acts.kept * (1 - acts.freed * reduced)
    return [
        replace(base, name="backward", activations=acts.kept + 1.25 * acts.tail, gradients=base.gradients + first),
        replace(base, name="backward", activations=acts.kept + acts.block, gradients=base.gradients + waiting),
        replace(
            at_reduction,
            name="backward",
            activations=left + 0.5 * acts.block,
            gradients=at_reduction.gradients + waiting,
        ),
    ]


def _optimizer_bytes(workload: Workload, terms: Terms) -> float:
    """Bytes a parameter: the master weight, and Adam's two moments."""
    return terms.master if workload.optimizer == "sgd" else terms.master + 2 * terms.moment


def offloaded(workload: Workload, candidate: Candidate, world_size: int) -> tuple[float, float]:
    """Host bytes over all ranks that offload takes, and the page-locked part; of the code, confirmed within 6 %.

    Pinned blocks round up to powers of two. Optimizer at stages 1 and 2: master, gradients (fp32) and new parameters
    (16 bits) pinned, moments not, and when stage 2 accumulates a pinned 16-bit gradient per parameter. At stage 3:
    master and moments pageable, gradients pinned in fp32 by sub-group and in 16 bits as one. Parameters are pinned
    twice: where they were made, and in the flat buffer. NVMe: four swap buffers of a sub-group in fp32, five of a
    parameter. Activations: the input of each layer, pinned.
    """
    rung, model = candidate.engine.rung, workload.model
    activations = model.num_layers * _power_of_two(offloaded_input(workload, candidate, world_size))
    if not rung.devices:
        return activations * world_size, activations * world_size
    share = model.num_parameters / world_size
    pageable, pinned = 0.0, activations
    moments = _optimizer_bytes(workload, terms_of(workload, candidate, world_size)) - 4.0
    group = min(share, engine_knobs(workload, candidate.engine).get("sub_group_size", share))
    if rung.offload_optimizer == "cpu" and rung.stage < 3:
        pageable += moments * share
        pinned += 2 * _power_of_two(4 * share) + _power_of_two(2 * share)
        pinned += 1.3 * 2 * share if candidate.accumulation > 1 and rung.stage == 2 else 0.0
    elif rung.offload_optimizer == "cpu":
        pageable += (4.0 + moments) * share
        pinned += _power_of_two(4 * group) * share / group + _power_of_two(2 * share)
    elif rung.offload_optimizer == "nvme":
        pinned += 4 * _power_of_two(4 * group) + _power_of_two(2 * share)
    if rung.offload_param == "cpu":
        pinned += 2 * _power_of_two(2 * share)
    elif rung.offload_param == "nvme":
        pinned += 5 * _power_of_two(2 * (-(-model.largest_parameter // world_size) + 4096))
    return (pageable + pinned) * world_size, pinned * world_size


def _power_of_two(num_bytes: float) -> float:
    """What PyTorch's pinned allocator takes for a block: the next power of two."""
    return float(1 << max(0, math.ceil(num_bytes) - 1).bit_length()) if num_bytes else 0.0
