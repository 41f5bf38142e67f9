"""The memory of training without DeepSpeed, by the moments of a step, with P parameters, T of them trained, N ranks.

Weights are in fp32 and computed with in 16 bits or, if so asked, in fp32: 4 P, and 8 T for Adam's two moments; they are
their own masters. With DDP, a script may train 16-bit weights without any, in half of these bytes; FSDP2 makes them
fp32 (accelerate 1.15).
Frozen weights beside adapters are in 16 bits, or in fewer where they are quantised; where peft has prepared these, all
others are in fp32. Gradients have 4 T from backward to the step, which sets them to None.

Seen on two H200 with a model of four layers: within 15 %. What autocast saves was counted on the CPU with
transformers' modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ladder.backends.activations import Activations, activations_of, terms_of
from ladder.backends.base import START, Device, Moment, with_one_dequantised
from ladder.candidates import Candidate
from ladder.units import MIB
from ladder.workload.trained import Weights
from ladder.workload.workload import Workload

_WORKSPACE = 64 * MIB
"""cuBLAS's workspace. Measured: as in `backends.deepspeed.moments`."""


def moments_of(workload: Workload, candidate: Candidate, world_size: int, device: Device) -> list[Moment]:
    """The moments at which memory may peak; the first is the idle engine after its first optimizer step."""
    rung = candidate.engine.rung
    build = _replicated if rung.stage == 0 else _sharded
    moments = build(workload, candidate, activations_of(workload, candidate, world_size, device), world_size)
    if workload.weights.quantised:
        moments = with_one_dequantised(moments, workload)
        if rung.stage > 0:  # before FSDP2 divides them, every rank has all quantised weights
            moments.insert(1, Moment(START, weights_bytes(workload), 0.0, 0.0))
    return [replace(moment, buffers=moment.buffers + _WORKSPACE) for moment in moments]


def _replicated(workload: Workload, candidate: Candidate, acts: Activations, world_size: int) -> list[Moment]:
    """DDP: everything on every GPU, in W bytes a value: 4, or 2 where a script trains 16-bit weights.

    Its reducer holds a copy of all gradients in buckets, if there are other ranks. Autocast keeps a 16-bit copy of each
    trained matrix until the end of forward, and of one whose block is not recomputed until this block's backward; of a
    frozen head in fp32 until the head's backward. It casts no embeddings, unless the head shares their weights.
    """
    weights, model, terms = workload.weights, workload.model, terms_of(workload, candidate, world_size)
    if workload.prepare_kbit and candidate.gradient_checkpointing:
        acts = replace(acts, block=acts.block + terms.tokens * (terms.kept_wide - terms.kept))
    t, width = _in_32_bits(weights), 2.0 if workload.trains_16_bits else 4.0
    autocasts = width > workload.width
    buckets = width * t if world_size > 1 else 0.0
    moments = workload.state_bytes(width) * t
    rest = Moment("initialisation", weights_bytes(workload, width), 0.0, moments, buffers=buckets)
    accumulated = width * t if candidate.accumulation > 1 else 0.0
    copy = terms.weight_copy
    cast = t if model.tied or not weights.is_whole else t - model.vocab_size * model.hidden_size
    blocks = min(cast, model.num_layers * model.num_block_parameters)
    forgotten = candidate.checkpointed * blocks
    copies = 2.0 * (cast - blocks) + copy * blocks
    if workload.prepare_kbit and not weights.trains_head:
        copies += 2.0 * model.vocab_size * model.hidden_size
    held = replace(rest, gradients=accumulated)
    more = _autocast_bytes(workload, candidate, world_size)
    live = {"forward": copies, "loss": copies - copy * forgotten}
    if not autocasts:
        more, live = 0.0, {"forward": 0.0, "loss": 0.0}
    return _passes(rest, held, acts, more, live, first=width * weights.largest_trained, gradients=width * t)


def _sharded(workload: Workload, candidate: Candidate, acts: Activations, world_size: int) -> list[Moment]:
    """FSDP2: fp32 shards, gathered in 16 bits layer by layer; without resharding, all layers from forward to backward.

    A unit is copied from the buffer in which it was gathered, so two units are there at a time; one rank casts into the
    unit itself. The head is a unit that stays until its backward; tied embeddings are part of it. accelerate reduces in
    16 bits: while accumulating, whole gradients are kept in 16 bits, and a unit's are copied into one more buffer to be
    scattered. Quantised weights are gathered as they are.
    """
    weights, rung = workload.weights, candidate.engine.rung
    t, n = _in_32_bits(weights), terms_of(workload, candidate, world_size).owners or world_size
    on_gpu = 0.0 if rung.offload_param == "cpu" else 1.0
    rest = Moment("initialisation", on_gpu * weights_bytes(workload) / n, 0.0, on_gpu * workload.state_bytes() * t / n)
    live, buffers = _gathered(workload, keeps=rung.stage == 2, alone=world_size == 1)
    accumulated = workload.width * t if candidate.accumulation > 1 else 0.0
    held = replace(rest, gradients=accumulated, buffers=buffers)
    tied_head = workload.model.vocab_size * workload.model.hidden_size if workload.model.tied else 0.0
    first = workload.width * (tied_head if weights.is_whole else weights.largest_trained)
    step = on_gpu * 4.0 * t / n
    return _passes(rest, held, acts, 0.0, live, first=first, gradients=max(accumulated, step), step=step)


def _gathered(workload: Workload, *, keeps: bool, alone: bool) -> tuple[dict[str, float], float]:
    """Bytes of gathered parameters at each moment, and of the buffers of reductions.

    `keeps`: gathered parameters stay from forward to backward. `alone`: there is no other rank to gather from.
    """
    weights, model, width = workload.weights, workload.model, workload.width
    head = width * model.vocab_size * model.hidden_size
    outside = width * max(0, model.num_parameters - model.num_layers * model.num_block_parameters)
    block = (weights.bytes_held - outside) / model.num_layers
    whole, tied = weights.bytes_held if keeps else 0.0, head if model.tied else 0.0
    units, buffer, of_head = (1, 0.0, 0.0) if alone else (2, block, block if model.tied else head)
    live = {
        "forward": whole + buffer if whole else tied + units * block,
        "loss": (whole or head) + of_head,
        "backward": whole or tied + units * block,
        "end": block + (tied or head) if whole else tied + units * block,
    }
    trained = width * min(model.num_block_parameters, weights.trained / model.num_layers)
    reduced_first = max(trained, head) if weights.trains_head and not model.tied else trained
    # The input of the last reduction, which is the head's at the start of backward, and a unit's gradients.
    return live, trained + reduced_first


def _passes(
    rest: Moment,
    held: Moment,
    acts: Activations,
    more: float,
    live: Mapping[str, float],
    *,
    first: float,
    gradients: float,
    step: float | None = None,
) -> list[Moment]:
    """Forward, loss, backward at its start and at its end, and the step, with `gradients` unless `step` says less.

    `more` bytes are saved under autocast, and `live` has those of 16-bit parameters: those at the start of backward are
    as in the loss if they are not named.
    """
    kept = acts.kept + more + acts.tail
    at_start = replace(held, name="backward", live=live.get("backward", live["loss"]))
    at_end = replace(held, name="backward", live=live.get("end", 0.0))
    without_reduction = replace(held, buffers=rest.buffers)
    return [
        rest,
        replace(
            without_reduction, name="forward", activations=kept, logits=acts.logits * 10 / 12, live=live["forward"]
        ),
        replace(without_reduction, name="loss", activations=kept, logits=acts.logits, live=live["loss"]),
        replace(at_start, activations=kept + acts.block, gradients=max(held.gradients, first)),
        replace(at_end, activations=acts.block, gradients=max(held.gradients, gradients)),
        replace(rest, name="step", gradients=gradients if step is None else step),
    ]


def weights_bytes(workload: Workload, width: float = 4.0) -> float:
    """Bytes of all weights: of `width` each, and beside adapters only these."""
    if workload.lora is None:
        return width * workload.weights.total
    weights = workload.weights
    return weights.bytes_held + weights.bytes_widened + (width - workload.width) * (weights.trained - weights.copied)


def _in_32_bits(weights: Weights) -> float:
    """Trained elements; two of peft's copies in 16 bits, with their gradients and moments, count as one."""
    return weights.trained - weights.copied / 2


def _autocast_bytes(workload: Workload, candidate: Candidate, world_size: int) -> float:
    """Bytes that all blocks save more than `activations_of` says; inputs of checkpointed blocks are in fp32 too.

    Beside adapters, frozen weights are in 16 bits, and so is what passes from block to block, unless peft has prepared
    the model.
    """
    model, terms = workload.model, terms_of(workload, candidate, world_size)
    inputs = 2.0 * model.hidden_size if workload.lora is None or workload.prepare_kbit else 0.0
    inputs += terms.unforgotten_wide - terms.unforgotten
    more = candidate.checkpointed * inputs + (1 - candidate.checkpointed) * (terms.kept_wide - terms.kept)
    return terms.tokens * workload.weights.reached_blocks * model.num_layers * more


def on_host(workload: Workload, candidate: Candidate, world_size: int) -> tuple[float, float]:
    """Bytes of host memory of all ranks, and the pinned part.

    With FSDP2 each rank of a training reads all weights before they are divided (transformers 5.23, on every rank, also
    where accelerate then sends them from rank 0; trials make random ones on rank 0 alone). Packed ones are read on each
    GPU. With offload, all ranks' weights, gradients and optimizer states stay there.
    """
    rung = candidate.engine.rung
    is_read = rung.stage > 0 and not workload.weights.quantised
    reading = world_size * weights_bytes(workload) if is_read else 0.0
    if rung.offload_param != "cpu":
        return reading, 0.0
    trained = _in_32_bits(workload.weights)
    pinned = weights_bytes(workload) + 4.0 * trained
    return max(reading, pinned + workload.state_bytes() * trained), pinned
