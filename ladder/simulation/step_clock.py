"""Simulates the time of a micro-step and of the optimizer: host, GPU, links and bus each have their own clock.

The micro-step is simulated segment by segment (embeddings, layers, head, layers backward). The host launches kernels
ahead of the GPU; stage 3 gathers in DeepSpeed's order; a bucket of gradients is sent when it is full. There is no
formula for overlap: the time follows from what has to wait for what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ladder.simulation.kernel_time import Chip, Kernels, Stretch
from ladder.step.assignment import Assignment
from ladder.step.gathering import Gathering
from ladder.step.operation import Block

# Host work, in seconds. Measured on the hosts of benchmarks/results/sweeps (benchmarks/physics.py), in steps whose
# kernels are too short to matter.
_CHECKPOINT = 1.2e-3
"""Per recomputed layer: what torch.utils.checkpoint saves and restores."""
_HOOK = {0: 0.0, 1: 0.05e-3, 2: 0.25e-3, 3: 0.15e-3}
"""Per parameter's gradient."""
_MODULES = {True: 14, False: 11}
"""Modules of a block, with or without a gated MLP: stage 3 has hooks before and after each, in each pass."""
_MODULES_OF_AN_ADAPTER = 2
"""A and B. Chosen: the modules around them have no parameters, so their hooks have little to do. Simulated steps of
QLoRA at stage 3 are then 0.8 to 1.2 of those recorded, but for two that were disturbed
(benchmarks/results/1xh200-adapters)."""
_MODULE_HOOK = 0.27e-3
_CROSSING_HOOK, _CROSSING_FETCH = 0.2e-3, 0.25e-3
"""Per parameter whose gradient is copied to the host, and per gathering of parameters from the host."""
_PARAMETER_STEP = 0.12e-3
"""Per parameter in the optimizer's step: norm, flattening, copies."""
_CONVERTED = 1.25e9
"""Bytes per second of fp32 master weights that are converted to 16 bits on the host: torch first copies to new pageable
memory, and one core converts. Measured: 1.2 to 1.4 GB/s in the three recorded sweeps of `zero3+param-cpu`."""
_ADAM_FIXED = 3e-3
_UNSHIELDED = 0.6
"""The share of a bucket's reduction that overlaps with earlier kernels without `overlap_comm` (chosen)."""


@dataclass(frozen=True, kw_only=True)
class Rig:
    """The speeds of a machine for one rank, in bytes per second."""

    chip: Chip
    launch: float
    """Seconds of the host to launch one kernel from Python."""
    host: float
    """How much slower this host runs Python than the measured ones, as a factor."""
    link: float
    """Between ranks, of the slowest link."""
    latency: float
    """Seconds of a tiny collective over all ranks."""
    node_link: float
    """Between the ranks of a node."""
    node_latency: float
    """Seconds of a tiny collective over the ranks of a node."""
    contention: float
    """The fraction of a transfer's time by which it delays concurrent kernels."""
    bus: float
    """Between a GPU and the host."""
    dram: float
    """A rank's share of the host's memory bandwidth."""
    drive: float
    """A rank's share of the drive's bandwidth."""


class StepClock:
    """The times of one assignment on one rig."""

    def __init__(self, assignment: Assignment, gathering: Gathering, rig: Rig) -> None:
        self._assignment, self._gathering, self._rig = assignment, gathering, rig
        self._kernels = Kernels(assignment, rig.chip)
        self._layers = assignment.workload.model.num_layers
        self._overlaps = bool(assignment.knobs.get("overlap_comm", False))
        self._host = self._gpu = self._wire = 0.0
        self._before = 0.0
        """When the GPU began with the last segment."""
        self._waiting = 0
        """Elements in the bucket."""

    def micro_step(self, *, boundary: bool, first: bool = True) -> float:
        """Seconds of forward and backward; at the `boundary`, stages 0 and 1 reduce accumulated gradients.

        In the `first` micro-step of an optimizer step, forward meets changed weights.
        """
        self._host = self._gpu = self._wire = self._before = 0.0
        self._waiting = 0
        arrivals: dict[int, list[float]] = {}
        fetches = list(self._gathering.fetches)[::-1]
        for segment, (stretch, gradients, hooks) in enumerate(self._segments()):
            began, copies = self._host, 0.0
            self._host += stretch.kernels * self._rig.launch * self._rig.host + hooks * self._rig.host
            while fetches and fetches[-1].issued <= segment:
                fetch = fetches.pop()
                if self._assignment.parameter_device != "none":
                    self._host += _CROSSING_FETCH * self._rig.host
                within = self._is_within_node(changed=first and fetch.needed <= 1 + self._layers)
                self._wire = max(self._wire, self._earliest(began)) + self._gather_seconds(fetch.elements, within)
                arrivals.setdefault(fetch.needed, []).append(self._wire)
                copies += self._copy_seconds(fetch.elements)
            there = arrivals.get(segment, [0.0])
            ready = max(self._gpu, began, there[0])
            self._before = ready
            # Only the segment's last kernels wait for its last transfer.
            self._gpu = max(ready + copies + stretch.gpu, there[-1] + stretch.gpu / len(there), self._host)
            self._reduce(gradients, boundary=boundary)
        self._send(self._waiting, boundary=boundary)
        return max(self._host, self._gpu, self._wire)

    def update(self) -> float:
        """Seconds of the optimizer step besides its micro-step."""
        assignment, rig = self._assignment, self._rig
        owned = assignment.share if assignment.stage else assignment.trained
        hooks = assignment.network.num_tensors * _PARAMETER_STEP * assignment.effects.tensor_step * rig.host
        if assignment.optimizer_device == "none":
            seconds = max(self._update_bytes() * owned / rig.chip.memory, hooks) + hooks / 2
            if assignment.parameter_device == "cpu":
                seconds += assignment.effects.master_bytes * owned / _CONVERTED
        elif assignment.optimizer_device == "cpu":
            seconds = hooks + self._cpu_adam(owned) + 2.0 * owned / rig.bus
            if assignment.stage == 1:
                seconds += 6.0 * owned / rig.bus  # gradients are copied to the host now, in 16 bits and in fp32
        else:
            seconds = hooks + self._swapped(owned) + 2.0 * owned / rig.bus
        if assignment.stage in (1, 2):
            seconds += self._collective(2.0 * assignment.trained)
        return seconds

    def _segments(self) -> list[tuple[Stretch, int, float]]:
        """By segment: its work, the elements of gradients that it creates, and additional seconds of the host."""
        assignment, network = self._assignment, self._assignment.network
        forward = {block: self._moved(self._kernels.block_forward(block)) for block in set(network.blocks)}
        backward = {block: self._moved(self._kernels.block_backward(block)) for block in forward}
        hook = self._gradient_hook()
        segments = [(self._kernels.lookup(backward=False), 0, 0.0)]
        segments += [(forward[block], 0, self._pass_hooks(block)) for block in network.blocks]
        head = 0 if assignment.workload.model.tied else network.trained_head
        segments.append((self._kernels.ends(), head, self._pass_hooks() / 7))
        for layer, block in reversed(list(enumerate(network.blocks))):
            if not block.reached:
                segments.append((Stretch(0.0, 0.0), 0, 0.0))
                continue
            work, hooks = backward[block], self._pass_hooks(block) + block.num_trained * hook
            if assignment.recomputes(layer):
                work, hooks = work + forward[block], hooks + self._pass_hooks(block) / 2 + _CHECKPOINT
            segments.append((work, block.trained, hooks))
        return [*segments, (self._kernels.lookup(backward=True), network.trained_table, 0.0)]

    def _gradient_hook(self) -> float:
        """Seconds of the host for a parameter's gradient."""
        crosses = self._assignment.optimizer_device != "none" and self._assignment.stage > 1
        return _HOOK[self._assignment.stage] + (_CROSSING_HOOK if crosses else 0.0)

    def _earliest(self, began: float) -> float:
        """When a transfer that the host asks for in a segment that it `began` can start."""
        return began

    def _pass_hooks(self, block: Block | None = None) -> float:
        """Seconds of stage 3's hooks in a pass through a block, or through one without adapters."""
        if self._assignment.stage < 3:
            return 0.0
        adapters = 0 if block is None else sum(each.name == "adapter sum" for each in block.operations)
        modules = _MODULES[self._assignment.workload.model.gated_mlp] + _MODULES_OF_AN_ADAPTER * adapters
        return 2 * modules * _MODULE_HOOK

    def _moved(self, stretch: Stretch) -> Stretch:
        """The work of a pass with exchanges for sequence parallelism and copies of offloaded activations."""
        assignment, seconds = self._assignment, 0.0
        model = assignment.workload.model
        if assignment.effects.shares_sequence:
            for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads):
                seconds += self._collective(2.0 * assignment.tokens * heads * model.head_dim)
        if assignment.candidate.offload_activations:
            seconds += 2.0 * assignment.tokens * model.hidden_size / self._rig.bus
        return Stretch(stretch.gpu + seconds, stretch.kernels)

    def _collective(self, num_bytes: float, *, within_node: bool = False) -> float:
        """Seconds of a collective: bytes as in a ring, in which ranks send all parts but one; latency as in a tree."""
        assignment, rig = self._assignment, self._rig
        ranks, link, latency = assignment.ranks, rig.link, rig.latency
        if within_node:
            ranks, link, latency = assignment.group, rig.node_link, rig.node_latency
        if ranks == 1:
            return 0.0
        return num_bytes * (ranks - 1) / ranks / link + latency * math.log2(2 * ranks)

    def _is_within_node(self, *, changed: bool) -> bool:
        """Whether parameters are gathered from the own node: from its copy, which has not `changed`, or always."""
        effects = self._assignment.effects
        return effects.divided_in_node or (effects.copied_in_node and not changed)

    def _copy_seconds(self, elements: int) -> float:
        """Seconds of the GPU to bring gathered parameters to their place; DeepSpeed gathers them there."""
        return 0.0

    def _gather_seconds(self, elements: int, within_node: bool) -> float:
        """Seconds to gather parameters: from the drive, over the bus, then between ranks; each has a part."""
        own = 2.0 * elements / self._assignment.ranks
        seconds = self._collective(2.0 * elements, within_node=within_node)
        if self._assignment.parameter_device != "none":
            seconds += own / self._rig.bus
        if self._assignment.parameter_device == "nvme":
            seconds += own / self._rig.drive
        return seconds

    def _reduce(self, elements: int, *, boundary: bool) -> None:
        """Add gradients to the bucket, and send it whenever it is full."""
        self._waiting += elements
        while self._waiting >= self._assignment.bucket:
            self._send(self._assignment.bucket, boundary=boundary)
            self._waiting -= self._assignment.bucket

    def _send(self, elements: int, *, boundary: bool) -> None:
        assignment = self._assignment
        if not elements or (assignment.stage < 2 and not boundary):
            return
        passes = 1 if assignment.stage == 3 else 2  # an all-reduce is a reduce-scatter and an all-gather
        seconds = passes * self._collective(2.0 * elements) + 3 * 2.0 * elements / self._rig.chip.memory
        crossing = 0.0
        if assignment.optimizer_device != "none":
            own = elements / assignment.ranks
            crossing = {1: 0.0, 2: 4.0 * own, 3: 4.0 * own}[assignment.stage] / self._rig.bus
            crossing += 4.0 * own / self._rig.bus if boundary and assignment.stage > 1 else 0.0
        if assignment.stage == 0:
            self._gpu = self._wire = max(self._gpu, self._wire, self._host) + seconds  # after backward, without overlap
        elif self._overlaps:
            self._wire = max(self._wire, self._gpu) + seconds + crossing
            self._gpu += self._rig.contention * seconds
        else:
            self._gpu += (1 - _UNSHIELDED) * seconds + crossing if assignment.stage == 3 else seconds + crossing
            self._wire = max(self._wire, self._gpu)

    def _update_bytes(self) -> float:
        """Bytes read and written per parameter: flattening, casting, norm, scaling, Adam, and the new 16-bit weight."""
        effects = self._assignment.effects
        gradient = effects.gradient_bytes or 2.0
        preparing = 4.0 + (2.0 + gradient if effects.gradient_bytes else 0.0) + 2.0 + 2.0 * gradient
        adam = gradient + 2.0 * effects.master_bytes + 2.0 * self._assignment.moments * effects.moment_bytes
        writing = effects.master_bytes + 2.0
        return preparing + adam * effects.update_passes + writing

    def _cpu_adam(self, owned: int) -> float:
        """Seconds of CPU Adam by memory bandwidth: norm and scaling of gradients, Adam, and the 16-bit copy."""
        effects = self._assignment.effects
        gradient = effects.gradient_bytes or 2.0
        moved = 2.0 * gradient + gradient + 2.0 * effects.master_bytes
        moved += 2.0 * self._assignment.moments * effects.moment_bytes + effects.master_bytes + 2.0
        return _ADAM_FIXED + moved * owned / self._rig.dram

    def _swapped(self, owned: int) -> float:
        """Seconds with NVMe: master weights, moments and gradients are read, Adam runs, and the first two written."""
        states = (
            self._assignment.effects.master_bytes + self._assignment.moments * self._assignment.effects.moment_bytes
        )
        moved = 2.0 * states + 4.0 + (2.0 if self._assignment.parameter_device == "nvme" else 0.0)
        return moved * owned / self._rig.drive + self._cpu_adam(owned)
