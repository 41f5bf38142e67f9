"""The formulas of the memory model: bytes of a candidate by moment and part, before calibration.

They are derived from DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, fp16/unfused_optimizer.py) and from
what transformers' blocks save for backward, and were compared with 99 measurements of a Llama-2-7B shape on four GPUs
(tests/data). P is the number of parameters, T that of the trained ones (P without adapters and freezing), N the number
of ranks, B the elements of a bucket. Only trained parameters have gradients, master weights and moments: the optimizer
gets no others.

**Not included.** At first, stages 1 and 2 flatten the parameters into a second copy (2 P), on the GPU if it has enough
memory, otherwise on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ladder.backends.activations import Activations, activations_of, offloaded_input, terms_of
from ladder.backends.base import START, Device, Moment, with_one_dequantised
from ladder.backends.deepspeed.config import engine_knobs
from ladder.candidates import Candidate
from ladder.units import MIB
from ladder.workload.workload import Workload

_WORKSPACE = 64 * MIB
"""cuBLAS's workspace. Measured: in every measurement, 0.065 GiB more than the model states."""
_NORM_PIECE = 250_000_000
"""Elements; defined in DeepSpeed's `stage3._constant_buffered_norm2`."""
_UNFUSED_BUCKET = 500_000_000
"""Elements of stage 0's all-reduce; defined in DeepSpeed's `engine.MEMORY_OPT_ALLREDUCE_SIZE`."""


def moments_of(workload: Workload, candidate: Candidate, world_size: int, device: Device) -> list[Moment]:
    """The moments at which memory may peak; the first is the idle engine after its first optimizer step."""
    stage = candidate.engine.rung.stage
    build = _moments_replicated if stage == 0 else _moments_stage3 if stage == 3 else _moments_stage12
    moments = build(workload, candidate, activations_of(workload, candidate, world_size, device), world_size)
    if workload.weights.quantised:
        moments = with_one_dequantised(moments, workload)
        # Before stage 3 divides them, every rank has all quantised weights (trial/quantised.py, and transformers too).
        # All but packed ones are in 16 bits once the engine has cast what peft may have made fp32.
        at_first = workload.weights.bytes_held + workload.weights.bytes_widened
        moments.insert(1, Moment(START, at_first, 0.0, 0.0))
    if device == "cpu":
        return _as_on_cpu(moments, offloaded(workload, candidate, world_size)[0] / world_size)
    if stage in (1, 2):
        # A rank's part of the flat weights is cloned on the GPU before it goes to the host as fp32. On one GPU that is
        # all of them: a 7B model cannot start with 24 GiB (seen on an H100; single_partition_of_fp32_groups).
        clone = workload.width * workload.weights.trained / world_size
        moments.insert(1, Moment(START, workload.weights.bytes_held + clone, 0.0, 0.0))
    return [replace(moment, buffers=moment.buffers + _WORKSPACE) for moment in moments]


_LOGITS_ON_CPU = 4 / 3
"""What a CPU holds of logits and loss over what a GPU does: the model's own logits and their gradient too. Measured:
four dense types in bf16 and two in fp32, four stages, three ways of checkpointing (benchmarks/types_on_cpu.py). A
mixture of experts took 9 to 40 % more than is predicted so."""


def _as_on_cpu(moments: Sequence[Moment], on_host: float) -> list[Moment]:
    """On a CPU, offloaded states stay on the same device."""
    held = [
        moment if moment.name == START else replace(moment, optimizer=moment.optimizer + on_host) for moment in moments
    ]
    return [
        replace(moment, logits=moment.logits * _LOGITS_ON_CPU) if moment.name == "loss" else moment for moment in held
    ]


def _moments_replicated(workload: Workload, candidate: Candidate, acts: Activations, world_size: int) -> list[Moment]:
    """Stage 0: everything on every GPU (FP16_UnfusedOptimizer, for bf16 too).

    16-bit parameters 2 P, master weights and moments 12 T, gradients 2 T; the step adds fp32 gradients, 4 T. In fp32
    the optimizer has no wrapper: weights are their own masters, and gradients have 4 T.
    """
    weights, terms = workload.weights, terms_of(workload, candidate, world_size)
    t, width = weights.trained, workload.width
    masters = terms.master if workload.dtype == "fp32" else 0.0
    rest = Moment("initialisation", weights.bytes_held, 0.0, (terms.master + terms.states - masters) * t)
    accumulated = width * t if candidate.accumulation > 1 else 0.0
    reduce_copy = width * min(t, _UNFUSED_BUCKET) if world_size > 1 else 0.0
    return [
        rest,
        *_forward_and_loss(replace(rest, gradients=accumulated), acts),
        replace(
            rest,
            name="backward",
            gradients=max(accumulated, width * weights.largest_trained),
            activations=acts.kept + acts.block + acts.tail,
        ),
        replace(rest, name="backward", gradients=width * t, buffers=reduce_copy, activations=acts.block),
        replace(rest, name="step", gradients=(width + terms.fp32_gradient) * t),
    ]


def _moments_stage12(workload: Workload, candidate: Candidate, acts: Activations, world_size: int) -> list[Moment]:
    """Stages 1 and 2: parameters on every GPU; the optimizer (and at stage 2 gradients) divided by N or on the host.

    Backward has one bucket of 2 B bytes, two with `overlap_comm`, and copies a full one to reduce it if it belongs to
    several ranks. The step makes a flat copy of the rank's gradients, 2 T/N, and another one in fp32, 4 T/N: 22 bytes
    per trained parameter on one GPU (measured). Offload keeps a buffer for the largest gradient on the GPU. At stage 1,
    offload accumulates all gradients on the GPU, copies a rank's own to the host in the last micro-step, and keeps
    buckets until then. Without `overlap_comm`, stage 1 keeps all gradients until backward is over, and then reduces.
    """
    weights, rung = workload.weights, candidate.engine.rung
    terms = terms_of(workload, candidate, world_size)
    knobs, width = engine_knobs(workload, candidate.engine, world_size), workload.width
    t, share, largest = weights.trained, weights.trained / world_size, width * weights.largest_trained
    offload = rung.offload_optimizer != "none"
    rest = Moment(
        "initialisation",
        weights.bytes_held,
        0.0,
        0.0 if offload else (terms.master + terms.states) * share,
        buffers=largest if offload else 0.0,
    )
    rest_gradients, at_boundary = 0.0, offload and rung.stage == 1
    if candidate.accumulation > 1:
        rest_gradients = width * t if rung.stage == 1 else 0.0 if offload else width * share
    bucket = width * knobs["reduce_bucket_size"]
    if at_boundary and candidate.accumulation == 1 and world_size > 1 and largest > bucket:
        rest_gradients = largest  # smaller gradients of other ranks are views of the bucket (reduce_ipg_grads)
    buckets = bucket * (2 if knobs["overlap_comm"] else 1)
    copy = min(bucket, width * t) if world_size > 1 else 0.0
    own = 0.0 if offload else width * share  # allocated when the copy of the first bucket is freed
    norm = 8.0 * min(weights.largest_trained, share) if offload else 0.0
    head = _head_gradient(workload, bucket, norm)
    held = rest.buffers + (buckets if at_boundary else 0.0)
    reducing = replace(rest, gradients=rest_gradients, buffers=rest.buffers + buckets + max(copy, own))
    backward = _backward(
        replace(rest, gradients=rest_gradients, buffers=rest.buffers + buckets),
        acts,
        first=max(largest, head - largest) if at_boundary else head,  # there it is accumulated
        waiting=largest if _waits(workload) and rest_gradients < width * t else 0.0,
        at_reduction=reducing,
        reduced=min(1.0, bucket / (width * t)),
    )
    if rung.stage == 1 and not knobs["overlap_comm"]:
        backward[-1:] = _late_reduction(reducing, width * t, max(copy, own), acts)
    return [
        rest,
        *_forward_and_loss(replace(rest, gradients=rest_gradients, buffers=held), acts),
        *backward,
        replace(rest, name="step", gradients=0.0 if offload else (2 * width + terms.fp32_gradient) * share),
    ]


def _late_reduction(reducing: Moment, gradients: float, more: float, acts: Activations) -> list[Moment]:
    """The end of backward with all `gradients`, and the reduction after it, which takes `more` buffers."""
    full = replace(reducing, name="backward", gradients=gradients)
    return [replace(full, activations=acts.block, buffers=full.buffers - more), full]


def _moments_stage3(workload: Workload, candidate: Candidate, acts: Activations, world_size: int) -> list[Moment]:
    """Stage 3: everything divided by N, plus the parameters that are gathered at the moment, and a second copy if the
    technique has one.

    Gradients always have 2 T/N bytes (on the host with the optimizer), and the bucket 2 B. Measured: at the loss, up to
    `stage3_max_live_parameters` are gathered, which are all in a small model. A full bucket is copied for the
    reduce-scatter. The step processes sub-groups of the rank's share, with 2 + 4 bytes of gradients per element.
    """
    model, weights, rung = workload.model, workload.weights, candidate.engine.rung
    terms = terms_of(workload, candidate, world_size)
    knobs = engine_knobs(workload, candidate.engine, world_size)
    width = workload.width
    p, share, part = weights.total, weights.trained / world_size, weights.largest_trained / world_size
    on_gpu = rung.offload_optimizer == "none"
    bucket = width * knobs["reduce_bucket_size"]
    rest = Moment(
        "initialisation",
        weights.bytes_held * (1 / world_size + terms.copied) if rung.offload_param == "none" else 0.0,
        width * share if on_gpu else 0.0,
        (terms.master + terms.states) * share if on_gpu else 0.0,
        buffers=bucket,
    )
    at_least = model.largest_parameter + knobs["stage3_prefetch_bucket_size"]
    cap = max(knobs["stage3_max_live_parameters"], at_least)
    live = width * (p if p <= cap + model.largest_parameter else cap)  # the last gathered parameter may exceed the cap
    if world_size == 1 and rung.offload_param == "none":
        live = 0.0  # there is nothing to gather with one rank (measured on one H200)
    later = width * min(live / width, max(at_least, p - bucket / width))
    full = min(bucket, width * weights.trained)
    group = min(share, knobs["sub_group_size"])
    copies = width + terms.fp32_gradient
    norm = 0.0 if on_gpu else 8.0 * min(part, _NORM_PIECE)
    return [
        rest,
        *_forward_and_loss(replace(rest, live=live), acts),
        *_backward(
            replace(rest, live=live),
            acts,
            first=_head_gradient(workload, bucket, width * part + norm),
            # If parameters are gathered, those of the head are freed by then, which leaves enough memory for it.
            waiting=width * weights.largest_trained if _waits(workload) and not live else 0.0,
            at_reduction=replace(rest, live=later, buffers=bucket + full * (1 + 1 / world_size)),
            reduced=min(1.0, bucket / (width * weights.trained)),
        ),
        replace(rest, name="step", gradients=rest.gradients + (copies * group if on_gpu else 0.0)),
    ]


def _forward_and_loss(base: Moment, acts: Activations) -> list[Moment]:
    return [
        # In forward, logits exist in 16 bits, in fp32 and as log-softmax: 10 of the loss's 12 bytes.
        replace(base, name="forward", activations=acts.kept + acts.tail, logits=acts.logits * 10 / 12),
        replace(base, name="loss", activations=acts.kept + acts.tail, logits=acts.logits),
    ]


def _waits(workload: Workload) -> bool:
    """Whether the gradient of a tied head waits for that of the embeddings."""
    return workload.model.tied and workload.weights.trains_head


def _head_gradient(workload: Workload, bucket: float, on_its_way: float) -> float:
    """Bytes of the head's gradient, plus `on_its_way` for copies if it is reduced by itself.

    It is if it is larger than the bucket: stage 3 scatters a copy, and before it is copied to the host, its norm is
    computed in fp64 (zero.utils.get_norm_dtype), 8 bytes more per element. With a vocabulary of 152k that was 1.7 GiB
    (measured), and the peak with small micro-batches if no logits are saved. The gradient of a tied head is complete
    only with that of the embeddings.
    """
    if not workload.weights.trains_head:
        return 0.0
    largest = workload.width * workload.weights.largest_trained
    return largest + (on_its_way if largest > bucket and not workload.model.tied else 0.0)


def _backward(
    base: Moment, acts: Activations, *, first: float, waiting: float, at_reduction: Moment, reduced: float
) -> list[Moment]:
    """Possible peaks of backward: its start, a block in the middle, and the reduction of the first full bucket.

    `first` is the memory of the head's gradient, which comes first. A tied head's gradient is `waiting` for that of the
    embeddings, which comes last (measured with long sequences, where the peak is at a block in the middle). `reduced`
    is the share of the model whose gradients are in the bucket: about the same share of the activations is freed by
    then, and half of the current block's (the bucket may fill at any point of the block; half is the measured average).
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


def offloaded(workload: Workload, candidate: Candidate, world_size: int) -> tuple[float, float]:
    """Bytes of host memory that offload needs on all ranks, and the pinned part; derived from the code, within 6 %.

    Pinned blocks are rounded up to powers of two. Optimizer at stages 1 and 2: master weights, gradients (fp32) and new
    parameters (16 bits) are pinned, moments are not; with accumulation, stage 2 also pins a 16-bit gradient per
    parameter. Optimizer at stage 3: master weights and moments are pageable; gradients are pinned in fp32 by sub-group,
    and in 16 bits in one block. Parameters are pinned twice: where they were created, and in the flat buffer. NVMe has
    four buffers of an fp32 sub-group, and five of a parameter. Offloaded activations: the input of each layer, pinned.
    """
    rung, model, width = candidate.engine.rung, workload.model, workload.width
    activations = model.num_layers * _power_of_two(offloaded_input(workload, candidate, world_size))
    if not rung.devices:
        return activations * world_size, activations * world_size
    share, held = workload.weights.trained / world_size, workload.weights.bytes_held / world_size
    pageable, pinned = 0.0, activations
    terms = terms_of(workload, candidate, world_size)
    states = terms.master + terms.states - 4.0
    group = min(share, engine_knobs(workload, candidate.engine, world_size).get("sub_group_size", share))
    if rung.offload_optimizer == "cpu" and rung.stage < 3:
        pageable += states * share
        pinned += 2 * _power_of_two(4 * share) + _power_of_two(width * share)
        pinned += 1.3 * width * share if candidate.accumulation > 1 and rung.stage == 2 else 0.0
    elif rung.offload_optimizer == "cpu":
        pageable += (4.0 + states) * share
        pinned += _power_of_two(4 * group) * share / group + _power_of_two(width * share)
    elif rung.offload_optimizer == "nvme":
        pinned += 4 * _power_of_two(4 * group) + _power_of_two(width * share)
    if rung.offload_param == "cpu":
        pinned += 2 * _power_of_two(held)
    elif rung.offload_param == "nvme":
        pinned += 5 * _power_of_two(width * (-(-model.largest_parameter // world_size) + 4096))
    return (pageable + pinned) * world_size, pinned * world_size


def _power_of_two(num_bytes: float) -> float:
    """The size of a block of PyTorch's pinned allocator: the next power of two."""
    return float(1 << max(0, math.ceil(num_bytes) - 1).bit_length()) if num_bytes else 0.0
